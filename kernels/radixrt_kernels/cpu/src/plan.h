// Which query rows read which keys together: once per step, for all layers.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "pack.h"

namespace radixrt {

// Keys are taken in blocks of this many positions, cut at its multiples whoever attends: so the order of a row's sums
// depends on its position alone.
constexpr int64_t kKeyBlock = 64;

// The positions of a block are taken four of each quarter in turn: 0..3, 16..19, 32..35, 48..51, 4..7 and so on. Read
// so, four streams of memory advance together, which the processor fetches ahead better than one. Only builds that read
// pages directly need it.
constexpr int64_t kTurn = 4, kTurns = 4;
constexpr bool kTakesTurns = kLanes == 16;

constexpr int64_t place_of(int64_t position) {
    if (!kTakesTurns) return position;
    constexpr int64_t kStretch = kKeyBlock / kTurns;
    return position % kStretch / kTurn * (kTurn * kTurns) + position / kStretch * kTurn + position % kTurn;
}

// Position at each place.
constexpr std::array<int32_t, kKeyBlock> kPositionAt = [] {
    std::array<int32_t, kKeyBlock> positions{};
    for (int64_t i = 0; i < kKeyBlock; ++i) positions[place_of(i)] = (int32_t)i;
    return positions;
}();

// Places that the first `count` positions of a block need: up to the last of them, or of the stretch before it.
inline int64_t num_places(int64_t count) {
    constexpr int64_t kStretch = kKeyBlock / kTurns;
    if (count <= 0 || !kTakesTurns) return std::max<int64_t>(count, 0);
    int64_t whole = (count - 1) / kStretch * kStretch;
    return std::max(place_of(count - 1), whole ? place_of(whole - 1) : 0) + 1;
}

// Rows of a group: enough to hide what packing a block costs, few enough that their sums stay in the cache. Groups that
// share positions may have as few as the least.
constexpr int64_t kMaxGroupRows = 96;
constexpr int64_t kMinGroupRows = 24;
constexpr int64_t kMinSharedPositions = 2 * kKeyBlock;

// The sequences of a step, as BatchInputs has them.
struct Batch {
    int64_t num_tokens, num_sequences, num_columns;
    const int32_t* page_table;   // [num_sequences, num_columns]
    const int32_t* query_start;  // [num_sequences + 1]
    const int32_t* context_lens;
};

// Consecutive new tokens of one sequence.
struct Member {
    const int32_t* pages;
    int64_t first_token;  // row of the step
    int64_t num_tokens;
    int64_t first_position;
};

// Members that read the positions [0, shared_stop) together, through the pages of the first of them, and then each
// its own. With one member nothing is shared.
struct Group {
    int64_t first_member, num_members, shared_stop;
};

struct AttentionPlan {
    std::vector<Member> members;
    std::vector<Group> groups;
    bool has_few_rows = true;  // in every group, so that the rows of all heads fit a core's cache
    bool has_shared = false;   // positions, in any group
    int64_t total_cost = 0, largest_cost = 0;  // of groups: rows times the positions that each sees

    void build(const Batch& batch, int64_t page_size, int64_t rows_per_token, bool shares, int num_threads);

private:
    void add_sequence(const Batch& batch, int64_t sequence, int64_t tokens_per_member);
    void add_shared(const Batch& batch, std::vector<int64_t>& sequences, int64_t page_size, int64_t rows_per_token,
                    int64_t max_rows);
    void sort_groups();
    int64_t cost_of(const Group& group) const;
};

inline int64_t num_new(const Batch& batch, int64_t b) { return batch.query_start[b + 1] - batch.query_start[b]; }
inline int64_t num_cached(const Batch& batch, int64_t b) { return batch.context_lens[b] - num_new(batch, b); }
inline const int32_t* pages_of(const Batch& batch, int64_t b) { return batch.page_table + b * batch.num_columns; }

inline void AttentionPlan::add_sequence(const Batch& batch, int64_t b, int64_t tokens_per_member) {
    int64_t new_tokens = num_new(batch, b), cached = num_cached(batch, b);
    for (int64_t first = 0; first < new_tokens; first += tokens_per_member) {
        int64_t count = std::min(tokens_per_member, new_tokens - first);
        groups.push_back({(int64_t)members.size(), 1, 0});
        members.push_back({pages_of(batch, b), batch.query_start[b] + first, count, cached + first});
    }
}

// Positions that a and b have in the same pages, before the new tokens of either, in whole key blocks.
inline int64_t shared_positions(const Batch& batch, int64_t a, int64_t b, int64_t page_size) {
    int64_t limit = std::min(num_cached(batch, a), num_cached(batch, b)), count = 0;
    const int32_t *x = pages_of(batch, a), *y = pages_of(batch, b);
    while (count < limit && x[count / page_size] == y[count / page_size]) count += page_size;
    return std::min(count, limit) / kKeyBlock * kKeyBlock;
}

// Sequences with equal leading pages are neighbours once sorted by page table. A group grows while that costs no
// member more than half of what it shares.
inline void AttentionPlan::add_shared(const Batch& batch, std::vector<int64_t>& sequences, int64_t page_size,
                                      int64_t rows_per_token, int64_t max_rows) {
    std::sort(sequences.begin(), sequences.end(), [&](int64_t a, int64_t b) {
        const int32_t *x = pages_of(batch, a), *y = pages_of(batch, b);
        return std::lexicographical_compare(x, x + batch.num_columns, y, y + batch.num_columns);
    });
    for (size_t i = 0; i < sequences.size();) {
        int64_t first = sequences[i], num_rows = num_new(batch, first) * rows_per_token, shared = 0;
        size_t stop = i + 1;
        for (; stop < sequences.size(); ++stop) {
            int64_t positions = shared_positions(batch, first, sequences[stop], page_size);
            num_rows += num_new(batch, sequences[stop]) * rows_per_token;
            if (positions < kMinSharedPositions || 2 * positions < shared || num_rows > max_rows) break;
            shared = shared ? std::min(shared, positions) : positions;
        }
        groups.push_back({(int64_t)members.size(), (int64_t)(stop - i), shared});
        for (; i < stop; ++i) {
            int64_t b = sequences[i];
            members.push_back({pages_of(batch, b), batch.query_start[b], num_new(batch, b), num_cached(batch, b)});
        }
    }
}

// Args: rows_per_token: query heads per kv head. shares: false where a window hides the leading positions.
inline void AttentionPlan::build(const Batch& batch, int64_t page_size, int64_t rows_per_token, bool shares,
                                 int num_threads) {
    members.clear();
    groups.clear();
    has_few_rows = true;
    std::vector<int64_t> sharing;
    int64_t num_sharing_rows = 0;
    for (int64_t b = 0; b < batch.num_sequences; ++b) {
        if (shares && 2 * num_new(batch, b) * rows_per_token <= kMinGroupRows) {
            sharing.push_back(b);
            num_sharing_rows += num_new(batch, b) * rows_per_token;
        } else {
            has_few_rows &= num_new(batch, b) * rows_per_token <= kMinGroupRows;
            add_sequence(batch, b, std::max<int64_t>(1, kMaxGroupRows / rows_per_token));
        }
    }
    // The larger the groups, the more rarely a shared block is packed; threads need several groups to end together.
    int64_t max_rows = num_threads == 1 ? kMaxGroupRows : num_sharing_rows / (2 * num_threads);
    add_shared(batch, sharing, page_size, rows_per_token, std::clamp(max_rows, kMinGroupRows, kMaxGroupRows));
    sort_groups();
}

// The longest work first, so that threads end together.
inline void AttentionPlan::sort_groups() {
    std::sort(groups.begin(), groups.end(),
              [&](const Group& a, const Group& b) { return cost_of(a) > cost_of(b); });
    has_shared = false;
    total_cost = 0;
    largest_cost = groups.empty() ? 0 : cost_of(groups[0]);
    for (const Group& group : groups) {
        has_shared |= group.shared_stop > 0;
        total_cost += cost_of(group);
    }
}

inline int64_t AttentionPlan::cost_of(const Group& group) const {
    int64_t total = 0;
    for (int64_t m = 0; m < group.num_members; ++m) {
        const Member& member = members[group.first_member + m];
        total += member.num_tokens * (member.first_position + member.num_tokens);
    }
    return total;
}

}  // namespace radixrt
