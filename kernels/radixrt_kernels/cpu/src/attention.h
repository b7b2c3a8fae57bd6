// Paged attention: rows of queries against blocks of keys, with the softmax taken block by block.
// Source of the running softmax: FlashAttention, arXiv:2205.14135. Of reading a shared prefix once for several
// sequences: Hydragen, arXiv:2402.05099; here the sums are carried on, not merged, so sharing changes no bit.
#pragma once

#include "direct.h"
#include "plan.h"
#include "team.h"

namespace radixrt {

// One layer of the KV store: [num_pages, 2, page_size, G, D], the first dimension strided.
template <class T>
struct KVLayer {
    T* data;
    int64_t page_stride, page_size, num_heads, head_dim;

    T* key(int64_t page, int64_t offset, int64_t head) const {
        return data + page * page_stride + (offset * num_heads + head) * head_dim;
    }
    int64_t value_offset() const { return page_size * num_heads * head_dim; }
};

template <class T>
struct AttentionLayer {
    const T* q;  // [T, H, D]
    T* output;   // [T, H, D]
    KVLayer<T> kv;
    int64_t num_query_heads;
    int64_t window;  // positions a token sees, itself included; 0 = all
    float scale;
};

// Where one thread keeps a group's rows and a block's keys and values. Rows of a group:
// kv head after kv head, member after member, token after token, the head's R query heads in order.
class AttentionScratch {
public:
    std::vector<Word> q, keys, values, weights, zeros;
    std::vector<float> scores, sums, maxima, totals;
    std::vector<int64_t> positions;

    void resize(int64_t num_rows, int64_t row_words, int64_t width) {
        auto grow = [](auto& buffer, int64_t count) {
            if ((int64_t)buffer.size() < count) buffer.resize(count);
        };
        grow(q, num_rows * row_words);
        grow(keys, kKeyBlock * row_words);
        grow(values, kKeyBlock * width);
        grow(weights, num_rows * kKeyBlock);
        grow(scores, num_rows * kKeyBlock);
        grow(sums, num_rows * width);
        grow(maxima, num_rows);
        grow(totals, num_rows);
        grow(positions, num_rows);
        grow(zeros, width);
    }
};

constexpr float kNothingSeen = -1e30f;

// The positions that are read next: their memory is asked for while the block before them is in use.
struct Ahead {
    const int32_t* pages = nullptr;
    int64_t start = 0, stop = 0;
};

// Attend of one group and the kv heads [first_head, stop_head), together for a block of keys: a token's heads lie side
// by side, and memory is read in long runs.
template <class T>
class GroupAttention {
public:
    GroupAttention(const AttentionLayer<T>& layer, int64_t first_head, int64_t stop_head, AttentionScratch& scratch)
        : layer_(layer),
          first_head_(first_head),
          stop_head_(stop_head),
          scratch_(scratch),
          head_dim_(layer.kv.head_dim),
          row_words_(layer.kv.head_dim / kWordElements<T>),
          width_(round_up(layer.kv.head_dim, kPanel)),
          rows_per_token_(layer.num_query_heads / layer.kv.num_heads),
          log2_scale_(layer.scale * kLog2E) {}

    // Args: next: what the thread will probably read after this group.
    void run(const Member* members, int64_t num_members, int64_t shared_stop, Ahead next) {
        num_rows_ = 0;
        for (int64_t m = 0; m < num_members; ++m) num_rows_ += members[m].num_tokens * rows_per_token_;
        scratch_.resize((stop_head_ - first_head_) * num_rows_, row_words_, width_);
        gather(members, num_members);
        if (shared_stop > 0) attend(0, num_rows_, members[0].pages, 0, shared_stop, begin(members[0], shared_stop));
        for (int64_t m = 0, row = 0; m < num_members; ++m) {
            const Member& member = members[m];
            int64_t count = member.num_tokens * rows_per_token_;
            Ahead after = m + 1 < num_members ? begin(members[m + 1], shared_stop) : next;
            attend(row, count, member.pages, begin(member, shared_stop).start, end_of(member), after);
            row += count;
        }
        scatter(members, num_members);
    }

    // The first block that a member reads from `start` on.
    Ahead begin(const Member& member, int64_t start) const {
        if (layer_.window) start = std::max(start, member.first_position + 1 - layer_.window);
        start = start / kKeyBlock * kKeyBlock;
        return {member.pages, start, std::min(start + kKeyBlock, end_of(member))};
    }

private:
    static int64_t end_of(const Member& member) { return member.first_position + member.num_tokens; }

    template <class Function>
    void for_each_row(const Member* members, int64_t num_members, Function&& function) {
        int64_t row = 0;
        for (int64_t head = first_head_; head < stop_head_; ++head)
            for (int64_t m = 0; m < num_members; ++m)
                for (int64_t t = 0; t < members[m].num_tokens; ++t)
                    for (int64_t h = 0; h < rows_per_token_; ++h, ++row) {
                        int64_t query_head = head * rows_per_token_ + h;
                        int64_t at = (members[m].first_token + t) * layer_.num_query_heads + query_head;
                        function(row, at * head_dim_, members[m].first_position + t);
                    }
    }

    void gather(const Member* members, int64_t num_members) {
        for_each_row(members, num_members, [&](int64_t row, int64_t at, int64_t position) {
            std::memcpy(&scratch_.q[row * row_words_], layer_.q + at, head_dim_ * sizeof(T));
            std::fill_n(&scratch_.sums[row * width_], width_, 0.0f);
            scratch_.maxima[row] = kNothingSeen;
            scratch_.totals[row] = 0.0f;
            scratch_.positions[row] = position;
        });
    }

    void scatter(const Member* members, int64_t num_members) {
        for_each_row(members, num_members, [&](int64_t row, int64_t at, int64_t) {
            float factor = 1.0f / scratch_.totals[row];
            const float* sums = &scratch_.sums[row * width_];
            int64_t d = 0;
            for (; d + kLanes <= head_dim_; d += kLanes)
                store_narrow(layer_.output + at + d, load<Floats>(sums + d) * factor);
            for (; d < head_dim_; ++d) narrow(sums[d] * factor, layer_.output + at + d);
        });
    }

    // Attend from rows [first_row, first_row + num_rows) to the positions [start, stop); start cuts key blocks.
    void attend(int64_t first_row, int64_t num_rows, const int32_t* pages, int64_t start, int64_t stop, Ahead next) {
        const bool is_direct = num_rows <= kMaxDirectRows && fits_directly<T>(head_dim_);
        for (int64_t block = start; block < stop; block += kKeyBlock) {
            int64_t count = std::min(kKeyBlock, stop - block), following = block + kKeyBlock;
            bool is_last = following >= stop;
            list_lines(is_last ? next : Ahead{pages, following, std::min(following + kKeyBlock, stop)}, is_direct);
            for (int64_t head = first_head_; head < stop_head_; ++head) {
                find_block(pages, head, block, count);
                if (!is_direct) pack_block(count);
                int64_t head_row = (head - first_head_) * num_rows_ + first_row;
                for_each_tile(num_rows, [&](int64_t first, auto row_count) {
                    attend_tile<decltype(row_count)::value>(head_row + first, block, count, is_direct);
                });
            }
        }
    }

    // List the memory of positions, in the order of addresses where that can be.
    void list_lines(Ahead ahead, bool is_direct) {
        const KVLayer<T>& kv = layer_.kv;
        const int64_t stride = kv.num_heads * head_dim_, wanted = (stop_head_ - first_head_) * head_dim_;
        stream_.clear();
        for (int64_t position = ahead.start; position < ahead.stop;) {
            int64_t offset = position % kv.page_size, count = std::min(kv.page_size - offset, ahead.stop - position);
            const T* keys = kv.key(ahead.pages[position / kv.page_size], offset, first_head_);
            for (const T* run : {keys, keys + kv.value_offset()}) {
                if (wanted == stride) {
                    stream_.add(run, count * stride * sizeof(T));
                } else {
                    for (int64_t i = 0; i < count; ++i) stream_.add(run + i * stride, wanted * sizeof(T));
                }
            }
            position += count;
        }
        int64_t num_squares = kKeyBlock / kLanes * (row_words_ / kLanes);
        int64_t value_steps = width_ / kPanel * (kKeyBlock / kWordElements<T>);
        int64_t num_units = is_direct ? kKeyUnits * kLanes * num_squares + kValueUnits * value_steps
                                      : 4 * num_squares + kKeyBlock + kKeyBlock / kPanel * row_words_ + value_steps;
        stream_.spread((stop_head_ - first_head_) * num_units);
    }

    // Positions past the context are zeros, whatever their slots hold.
    void find_block(const int32_t* pages, int64_t head, int64_t block, int64_t count) {
        const int64_t to_value = layer_.kv.value_offset();
        for_each_key(pages, head, block, block + count, [&](int64_t position, const T* key) {
            keys_[position - block] = reinterpret_cast<const Word*>(key);
            values_[position - block] = key + to_value;
        });
        const Word* zeros = scratch_.zeros.data();
        for (int64_t i = count; i < kKeyBlock; ++i) {
            keys_[i] = zeros;
            values_[i] = reinterpret_cast<const T*>(zeros);
        }
    }

    // Keys become panels of 32 positions, values steps over positions.
    void pack_block(int64_t count) {
        for (int64_t first = 0; first < count; first += kPanel)
            pack_panel(keys_ + first, row_words_, &scratch_.keys[first * row_words_], stream_);
        pack_values(values_, count, head_dim_, width_, scratch_.values.data(), stream_);
    }

    // Call function(position, key) for the positions [start, stop), page by page: one division, not one a position.
    template <class Function>
    void for_each_key(const int32_t* pages, int64_t head, int64_t start, int64_t stop, Function&& function) const {
        const int64_t page_size = layer_.kv.page_size, stride = layer_.kv.num_heads * head_dim_;
        int64_t column = start / page_size, offset = start % page_size;
        for (int64_t position = start; position < stop; ++column, offset = 0) {
            const T* key = layer_.kv.key(pages[column], offset, head);
            for (; offset < page_size && position < stop; ++offset, ++position, key += stride) function(position, key);
        }
    }

    template <int kRows>
    void attend_tile(int64_t first, int64_t block, int64_t count, bool is_direct) {
        // Rows are in the order of their positions within a member, so the last sees the most, the first the least.
        int64_t visible = 0;
        for (int r = 0; r < kRows; ++r) visible = std::max(visible, scratch_.positions[first + r] + 1 - block);
        visible = std::min(visible, count);
        if (visible <= 0) return;
        int64_t num_panels = (visible + kPanel - 1) / kPanel;
        const Word* q = &scratch_.q[first * row_words_];
        float* scores = &scratch_.scores[first * kKeyBlock];
        if (kRows <= kMaxDirectRows && is_direct) {
            score_directly<T, kRows>(q, row_words_, keys_, num_panels * kPanel, scores, kKeyBlock, stream_);
        } else {
            for (int64_t p = 0; p < num_panels; ++p) {
                Floats sums[kRows][kPanelVectors] = {};
                multiply<T, kRows>(q, row_words_, &scratch_.keys[p * kPanel * row_words_], kPanel, row_words_, sums,
                                   [&] { stream_.advance(1); });
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kPanelVectors; ++v)
                        store(scores + r * kKeyBlock + p * kPanel + v * kLanes, sums[r][v]);
            }
        }
        float factors[kRows];
        for (int r = 0; r < kRows; ++r) factors[r] = weigh(first + r, block, num_panels * kPanel);
        constexpr int64_t kWeightWords = kKeyBlock / kWordElements<T>;
        int64_t num_steps = (visible + kWordElements<T> - 1) / kWordElements<T>;
        for (int64_t d = 0; d < width_; d += kPanel) {
            Floats sums[kRows][kPanelVectors];
            float* running = &scratch_.sums[first * width_ + d];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v)
                    sums[r][v] = load<Floats>(running + r * width_ + v * kLanes) * factors[r];
            const Word* weights = &scratch_.weights[first * kWeightWords];
            if (kRows <= kMaxDirectRows && is_direct) {
                add_values_directly<T, kRows>(weights, kWeightWords, values_, d, num_steps, sums, stream_);
            } else {
                multiply<T, kRows>(weights, kWeightWords, &scratch_.values[d], width_, num_steps, sums,
                                   [&] { stream_.advance(1); });
            }
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v) store(running + r * width_ + v * kLanes, sums[r][v]);
        }
    }

    // Turn a row's scores of a block into weights; give the factor for what was summed before.
    float weigh(int64_t row, int64_t block, int64_t num_scores) {
        int64_t position = scratch_.positions[row];
        int64_t low = layer_.window ? position + 1 - layer_.window - block : 0, high = position + 1 - block;
        float* scores = &scratch_.scores[row * kKeyBlock];
        T* weights = reinterpret_cast<T*>(scratch_.weights.data()) + row * kKeyBlock;
        if (low > 0 || high < num_scores) {
            for (int64_t i = 0; i < num_scores; ++i)
                if (i < low || i >= high) scores[i] = kNothingSeen;
        }
        Floats best = load<Floats>(scores);
        for (int64_t i = kLanes; i < num_scores; i += kLanes) best = larger(best, load<Floats>(scores + i));
        float& maximum = scratch_.maxima[row];
        float new_maximum = largest_lane(best) * log2_scale_;
        float factor = 1.0f;
        if (new_maximum > maximum) {
            factor = exp2(splat(maximum - new_maximum))[0];
            maximum = new_maximum;
        }
        Floats total = {};
        for (int64_t i = 0; i < num_scores; i += kLanes) {
            Floats score = load<Floats>(scores + i);
            Floats weight = exp2(score * log2_scale_ - maximum);
            weight = score > kNothingSeen ? weight : Floats{};
            total += weight;
            store_narrow(weights + i, weight);
        }
        scratch_.totals[row] = scratch_.totals[row] * factor + sum_lanes(total);
        return factor;
    }

    const AttentionLayer<T>& layer_;
    const int64_t first_head_, stop_head_;
    AttentionScratch& scratch_;
    const int64_t head_dim_, row_words_, width_, rows_per_token_;
    LineStream stream_;
    const Word* keys_[kKeyBlock];
    const T* values_[kKeyBlock];
    int64_t num_rows_ = 0;  // of one head
    const float log2_scale_;
};

// Attend of a whole step in one layer; all threads of the team call this.
template <class T>
inline void attend_all(Team& team, int thread, const AttentionLayer<T>& layer, const AttentionPlan& plan,
                       AttentionScratch& scratch) {
    // Few groups: a head apiece, so that no thread idles.
    int64_t num_heads = layer.kv.num_heads, num_groups = plan.groups.size();
    int64_t heads_per_item = plan.has_few_rows && num_groups >= 4 * team.num_threads() ? num_heads : 1;
    int64_t items_per_group = num_heads / heads_per_item;
    team.for_each(thread, num_groups * items_per_group, [&](int64_t item) {
        const Group& group = plan.groups[item / items_per_group];
        int64_t first_head = item % items_per_group * heads_per_item;
        GroupAttention<T> attention(layer, first_head, first_head + heads_per_item, scratch);
        Ahead next;
        if (items_per_group == 1 && item + 1 < num_groups) {
            const Group& following = plan.groups[item + 1];
            next = attention.begin(plan.members[following.first_member], 0);
        }
        attention.run(&plan.members[group.first_member], group.num_members, group.shared_stop, next);
    });
}

}  // namespace radixrt
