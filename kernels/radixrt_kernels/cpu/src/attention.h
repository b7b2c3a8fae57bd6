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

    void resize(int64_t num_rows, int64_t row_words, int64_t width, int64_t num_heads) {
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
        grow(totals, num_rows * kLanes);
        grow(positions, num_rows);
        grow(zeros, num_heads * width);
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
        scratch_.resize((stop_head_ - first_head_) * num_rows_, row_words_, width_, stop_head_ - first_head_);
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
            store(&scratch_.totals[row * kLanes], Floats{});
            scratch_.positions[row] = position;
        });
    }

    void scatter(const Member* members, int64_t num_members) {
        for_each_row(members, num_members, [&](int64_t row, int64_t at, int64_t) {
            float factor = 1.0f / sum_lanes(load<Floats>(&scratch_.totals[row * kLanes]));
            float* sums = &scratch_.sums[row * width_];
            put_in_order(sums, head_dim_, T{});
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
            Ahead ahead = following < stop ? Ahead{pages, following, std::min(following + kKeyBlock, stop)} : next;
            list_far_lines(ahead, count, is_direct);
            find_block(pages, block, count);
            if constexpr (kMaxDirectRows > 0) {
                if (is_direct) {
                    list_near_lines({pages, block, block + count}, ahead);
                    auto run = [&](auto rows) { attend_directly<decltype(rows)::value>(first_row, block, count); };
                    with_row_count<kMaxDirectRows>(num_rows, run);
                    continue;
                }
            }
            for (int64_t head = 0; head < stop_head_ - first_head_; ++head) {
                pack_block(head, count);
                for_each_tile(num_rows, [&](int64_t first, auto rows) {
                    attend_tile<decltype(rows)::value>(head * num_rows_ + first_row + first, block, count);
                });
            }
        }
    }

    // List the next block's memory, in the order of addresses where that can be. Args: count: positions of this one.
    void list_far_lines(Ahead ahead, int64_t count, bool is_direct) {
        far_.clear();
        for_each_run(ahead.pages, ahead.start, ahead.stop, [&](int64_t, int64_t length, const T* keys) {
            add_lines(far_, keys, length);
            add_lines(far_, keys + layer_.kv.value_offset(), length);
        });
        far_.translate();
        far_.start();
        int64_t num_vectors = (round_up(count, kLanes) + count) * head_dim_ * (int64_t)sizeof(T) / kLineBytes;
        int64_t num_squares = kKeyBlock / kLanes * (row_words_ / kLanes);
        int64_t num_units = is_direct ? num_vectors : 8 * num_squares + kKeyBlock + 2 * kKeyBlock / kPanel * row_words_;
        far_.spread((stop_head_ - first_head_) * num_units);
    }

    // List this block's memory in the order in which attend_directly() reads it, then the first of the next one's.
    void list_near_lines(Ahead block, Ahead ahead) {
        near_.clear();
        if (layer_.kv.page_size == 1) return;  // runs too short to be worth a second list
        for (int64_t offset : {(int64_t)0, layer_.kv.value_offset()})
            for_each_run(block.pages, block.start, block.stop,
                         [&](int64_t, int64_t length, const T* keys) { add_lines(near_, keys + offset, length); });
        for_each_run(ahead.pages, ahead.start, std::min(ahead.start + kLanes, ahead.stop),
                     [&](int64_t, int64_t length, const T* keys) { add_lines(near_, keys, length); });
        near_.start(kNearLead);
    }

    // Add the wanted heads' keys, or values, of consecutive positions of a page.
    template <class Lines>
    void add_lines(Lines& lines, const T* first, int64_t num_positions) const {
        const int64_t stride = layer_.kv.num_heads * head_dim_, wanted = (stop_head_ - first_head_) * head_dim_;
        lines.add(first, wanted * sizeof(T), num_positions, stride * sizeof(T));
    }

    // Keys and values of the first head; the others' follow them. Positions past the context are zeros, whatever their
    // slots hold.
    void find_block(const int32_t* pages, int64_t block, int64_t count) {
        const int64_t to_value = layer_.kv.value_offset(), stride = layer_.kv.num_heads * head_dim_;
        for_each_run(pages, block, block + count, [&](int64_t position, int64_t length, const T* key) {
            for (int64_t i = position - block; i < position - block + length; ++i, key += stride) {
                keys_[i] = reinterpret_cast<const Word*>(key);
                values_[i] = key + to_value;
            }
        });
        const Word* zeros = scratch_.zeros.data();
        for (int64_t i = count; i < kKeyBlock; ++i) {
            keys_[i] = zeros;
            values_[i] = reinterpret_cast<const T*>(zeros);
        }
    }

    // Keys become panels of 32 positions, values steps over positions.
    void pack_block(int64_t head, int64_t count) {
        for (int64_t first = 0; first < count; first += kPanel)
            pack_panel(keys_ + first, head * row_words_, row_words_, &scratch_.keys[first * row_words_], far_);
        pack_values(values_, head * head_dim_, count, head_dim_, width_, scratch_.values.data(), far_);
    }

    // Call function(first position, count, key of the first wanted head) for the positions [start, stop), page by page.
    template <class Function>
    void for_each_run(const int32_t* pages, int64_t start, int64_t stop, Function&& function) const {
        const int64_t page_size = layer_.kv.page_size;
        int64_t column = start / page_size, offset = start % page_size;
        for (int64_t position = start; position < stop; ++column, offset = 0) {
            int64_t count = std::min(page_size - offset, stop - position);
            function(position, count, layer_.kv.key(pages[column], offset, first_head_));
            position += count;
        }
    }

    // Positions of the block that any of the rows sees. Rows are in the order of their positions within a member.
    int64_t num_visible(int64_t first, int num_rows, int64_t block, int64_t count) const {
        int64_t visible = 0;
        for (int r = 0; r < num_rows; ++r) visible = std::max(visible, scratch_.positions[first + r] + 1 - block);
        return std::min(visible, count);
    }

    // The same rows of every head, a few positions at a time: so memory is read nearly in the order of its addresses.
    template <int kRows>
    void attend_directly(int64_t first_row, int64_t block, int64_t count) {
        const int64_t visible = num_visible(first_row, kRows, block, count), num_scores = round_up(visible, kLanes);
        const int64_t num_heads = stop_head_ - first_head_;
        if (visible <= 0) return;
        for (int64_t i = 0; i < num_scores; i += kLanes)
            for (int64_t head = 0; head < num_heads; ++head) {
                int64_t row = head * num_rows_ + first_row;
                score_directly<T, kRows>(&scratch_.q[row * row_words_], row_words_, keys_ + i, head * row_words_,
                                         &scratch_.scores[row * kKeyBlock + i], kKeyBlock, far_, near_);
            }
        for (int64_t head = 0; head < num_heads; ++head)
            for (int r = 0; r < kRows; ++r) weigh(head * num_rows_ + first_row + r, block, num_scores);
        for (int64_t i = 0; i < visible; i += kValuePositions) {
            int64_t stop = std::min(i + kValuePositions, visible);
            for (int64_t head = 0; head < num_heads; ++head)
                add_head_directly<kRows>(head, head * num_rows_ + first_row, i, stop);
        }
    }

    // Add the weighted values of positions [start, stop) of the block to the sums of kRows rows.
    template <int kRows>
    void add_head_directly(int64_t head, int64_t row, int64_t start, int64_t stop) {
        constexpr int64_t kWeightWords = kKeyBlock / kWordElements<T>;
        constexpr int kTwoPanels = 2 * kPanelVectors;
        const int64_t num_steps = (stop - start + kWordElements<T> - 1) / kWordElements<T>;
        const Word* weights = &scratch_.weights[row * kWeightWords + start / kWordElements<T>];
        float* running = &scratch_.sums[row * width_];
        auto add = [&](auto num_vectors, int64_t d) {
            add_values_directly<T, kRows, decltype(num_vectors)::value>(weights, kWeightWords, values_ + start,
                                                                        head * head_dim_ + d, num_steps, running + d,
                                                                        width_, far_, near_);
        };
        int64_t d = 0;
        for (; d + 2 * kPanel <= width_; d += 2 * kPanel) add(RowCount<kTwoPanels>{}, d);
        if (d < width_) add(RowCount<kPanelVectors>{}, d);
    }

    template <int kRows>
    void attend_tile(int64_t first, int64_t block, int64_t count) {
        const int64_t visible = num_visible(first, kRows, block, count);
        if (visible <= 0) return;
        int64_t num_panels = (visible + kPanel - 1) / kPanel;
        const Word* q = &scratch_.q[first * row_words_];
        float* scores = &scratch_.scores[first * kKeyBlock];
        for (int64_t p = 0; p < num_panels; ++p) {
            Floats sums[kRows][kPanelVectors] = {};
            multiply<T, kRows>(q, row_words_, &scratch_.keys[p * kPanel * row_words_], kPanel, row_words_, sums,
                               [&] { far_.advance<2>(); });
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v)
                    store(scores + r * kKeyBlock + p * kPanel + v * kLanes, sums[r][v]);
        }
        for (int r = 0; r < kRows; ++r) weigh(first + r, block, num_panels * kPanel);
        constexpr int64_t kWeightWords = kKeyBlock / kWordElements<T>;
        int64_t num_steps = (visible + kWordElements<T> - 1) / kWordElements<T>;
        const Word* weights = &scratch_.weights[first * kWeightWords];
        float* running = &scratch_.sums[first * width_];
        for (int64_t d = 0; d < width_; d += kPanel) {
            Floats sums[kRows][kPanelVectors];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v)
                    sums[r][v] = load<Floats>(running + r * width_ + d + v * kLanes);
            multiply<T, kRows>(weights, kWeightWords, &scratch_.values[d], width_, num_steps, sums, [] {});
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v) store(running + r * width_ + d + v * kLanes, sums[r][v]);
        }
    }

    // Turn a row's scores of a block into weights; a new maximum scales down what was summed before.
    void weigh(int64_t row, int64_t block, int64_t num_scores) {
        const int64_t position = scratch_.positions[row];
        const int64_t low = layer_.window ? position + 1 - layer_.window - block : 0, high = position + 1 - block;
        const bool hides = low > 0 || high < num_scores;
        float* scores = &scratch_.scores[row * kKeyBlock];
        if (hides) {
            for (int64_t i = 0; i < num_scores; ++i)
                if (i < low || i >= high) scores[i] = kNothingSeen;
        }
        Floats best = load<Floats>(scores);
        for (int64_t i = kLanes; i < num_scores; i += kLanes) best = larger(best, load<Floats>(scores + i));
        float new_maximum = largest_lane(best) * log2_scale_;
        if (new_maximum > scratch_.maxima[row]) {
            rescale(row, exp2(splat(scratch_.maxima[row] - new_maximum))[0]);
            scratch_.maxima[row] = new_maximum;
        }
        T* weights = reinterpret_cast<T*>(scratch_.weights.data()) + row * kKeyBlock;
        if (hides) {
            write_weights<true>(row, scores, num_scores, weights);
        } else {
            write_weights<false>(row, scores, num_scores, weights);
        }
    }

    template <bool kHides>
    void write_weights(int64_t row, const float* scores, int64_t num_scores, T* weights) {
        const float maximum = scratch_.maxima[row];
        float* totals = &scratch_.totals[row * kLanes];
        Floats total = load<Floats>(totals);
        for (int64_t i = 0; i < num_scores; i += kLanes) {
            Floats score = load<Floats>(scores + i);
            Floats weight = exp2(score * log2_scale_ - maximum);
            if constexpr (kHides) weight = score > kNothingSeen ? weight : Floats{};
            total += weight;
            store_narrow(weights + i, weight);
        }
        store(totals, total);
    }

    void rescale(int64_t row, float factor) {
        float *sums = &scratch_.sums[row * width_], *totals = &scratch_.totals[row * kLanes];
        for (int64_t d = 0; d < width_; d += kLanes) store(sums + d, load<Floats>(sums + d) * factor);
        store(totals, load<Floats>(totals) * factor);
    }

    const AttentionLayer<T>& layer_;
    const int64_t first_head_, stop_head_;
    AttentionScratch& scratch_;
    const int64_t head_dim_, row_words_, width_, rows_per_token_;
    FarLines far_;
    NearLines near_;
    const Word* keys_[kKeyBlock];
    const T* values_[kKeyBlock];
    int64_t num_rows_ = 0;  // of one head
    const float log2_scale_;
};

// When the last thread ends, at most, if every group is cut into this many equal items; in the unit of costs.
inline double latest_end(const AttentionPlan& plan, int64_t items_per_group, int num_threads) {
    double largest = (double)plan.largest_cost / items_per_group, share = (double)plan.total_cost / num_threads;
    int64_t num_items = plan.groups.size() * items_per_group;
    double if_equal = largest * ((num_items + num_threads - 1) / num_threads);
    return std::min(if_equal, share + largest * (num_threads - 1) / num_threads);
}

// Heads apart read memory in pieces: measured 1.4 times the time, 1.1 where it is not read straight from the pages. So
// they are apart only where threads would idle else, or where their rows would not fit the cache.
inline bool keeps_heads_together(const AttentionPlan& plan, int64_t num_heads, int num_threads) {
    const double price = kMaxDirectRows > 0 && !plan.has_shared ? 1.4 : 1.1;
    return plan.has_few_rows && latest_end(plan, 1, num_threads) <= price * latest_end(plan, num_heads, num_threads);
}

// Attend of a whole step in one layer; all threads of the team call this.
template <class T>
inline void attend_all(Team& team, int thread, const AttentionLayer<T>& layer, const AttentionPlan& plan,
                       AttentionScratch& scratch) {
    int64_t num_heads = layer.kv.num_heads, num_groups = plan.groups.size();
    int64_t heads_per_item = keeps_heads_together(plan, num_heads, team.num_threads()) ? num_heads : 1;
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
