// Which positions are read next: their memory is asked for while those before them are in use.
#pragma once

#include "plan.h"

namespace radixrt {

struct Ahead {
    const int32_t* pages = nullptr;
    int64_t start = 0, stop = 0;
};

inline int64_t end_of(const Member& member) { return member.first_position + member.num_tokens; }

// The blocks that the members of a group read each on its own, in order, after those that they share.
//
// Products with shared blocks keep the vectors busy and leave memory idle, products with own ones wait for memory: so
// the first own blocks are asked for with the last shared ones, one with each, and stay that far ahead. As far as the
// second-level cache has room: where it has 2 MB, reading 896 of 1,024 positions together is 1.05 times as fast; two
// with each are too many (0.97).
class OwnBlocks {
public:
    static constexpr int64_t kRoomBytes = kWidens ? 700000 : 0;

    OwnBlocks() = default;
    OwnBlocks(const Member* members, int64_t num_members, int64_t shared_stop, int64_t block_bytes)
        : shared_stop_(shared_stop),
          reach_(kRoomBytes / block_bytes * kKeyBlock),
          member_(members),
          stop_(shared_stop > 0 && reach_ > 0 ? members + num_members : members),
          start_(shared_stop) {}

    bool is_done() const { return member_ == stop_; }
    bool is_shared(int64_t block) const { return block < shared_stop_; }
    // Whether the next one is to be asked for with the block that begins at this position.
    bool is_due(int64_t block) const { return !is_done() && shared_stop_ - block <= reach_; }

    Ahead take() {
        const Ahead block{member_->pages, start_, std::min(start_ + kKeyBlock, end_of(*member_))};
        start_ += kKeyBlock;
        if (start_ >= end_of(*member_)) ++member_, start_ = shared_stop_;
        return block;
    }

private:
    int64_t shared_stop_ = 0, reach_ = 0;
    const Member *member_ = nullptr, *stop_ = nullptr;
    int64_t start_ = 0;
};

}  // namespace radixrt
