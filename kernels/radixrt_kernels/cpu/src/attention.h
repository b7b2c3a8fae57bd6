// Paged attention: rows of queries against blocks of keys, with the softmax taken block by block.
// Source of the running softmax: FlashAttention, arXiv:2205.14135. Of reading a shared prefix once for several
// sequences: Hydragen, arXiv:2402.05099; here the sums are carried on, not merged, so sharing changes no bit.
#pragma once

#include "kv_layer.h"
#include "scratch.h"
#include "softmax.h"
#include "team.h"

namespace radixrt {

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
          row_steps_(layer.kv.head_dim / kWordElements<Held<T>>),
          width_(round_up(layer.kv.head_dim, kPanel)),
          rows_per_token_(layer.num_query_heads / layer.kv.num_heads),
          is_quartered_(has_quarters(row_words_)),
          log2_scale_(layer.scale * kLog2E) {}

    // Args: next: what the thread will probably read after this group.
    void run(const Member* members, int64_t num_members, int64_t shared_stop, Ahead next) {
        num_rows_ = 0;
        for (int64_t m = 0; m < num_members; ++m) num_rows_ += members[m].num_tokens * rows_per_token_;
        scratch_.resize((stop_head_ - first_head_) * num_rows_, row_steps_, width_, stop_head_ - first_head_);
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
    static constexpr int64_t kNearBytes = 4096, kMaxTurnBytes = 10240;
    static constexpr int kSumUnits = 8;  // of asking for memory, before the sum over a quarter
    static constexpr int64_t kFollowing = 16;  // places that are asked for ahead of use, into the first cache

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
            gather_q(layer_.q + at, row);
            std::fill_n(&scratch_.sums[row * width_], width_, 0.0f);
            scratch_.ceilings[row] = kNothingSeen;
            store(&scratch_.totals[row * kLanes], Floats{});
            scratch_.positions[row] = position;
        });
    }

    void gather_q(const T* source, int64_t row) {
        Word* q = &scratch_.q[row * row_steps_];
        if (!is_quartered_) return hold(source, head_dim_, q);
        constexpr int64_t kElements = kQuarterWords * kWordElements<T>;
        for (int64_t word = 0; word < row_words_; word += kQuarterWords, source += kElements)
            hold(source, kElements, q + quartered(word, row_words_) * kHeldSteps<T>);
    }

    static int64_t num_passes(int64_t num_rows) { return num_rows > kMaxDirectRows ? 2 : 1; }

    // Call function(first row, count) for the rows of each pass over a block straight from the pages.
    template <class Function>
    void for_each_pass(int64_t first_row, int64_t num_rows, Function&& function) {
        for (int64_t i = 0; i < num_passes(num_rows); ++i) {
            const int64_t first = num_rows * i / num_passes(num_rows);
            const int64_t stop = num_rows * (i + 1) / num_passes(num_rows);
            first_wide_row_ = (stop_head_ - first_head_) * first;
            function(first_row + first, stop - first);
        }
    }

    // The rows [first_row, first_row + num_rows) of every head as products straight from the pages want them: only now,
    // so that they are in the first cache.
    void widen_rows(int64_t first_row, int64_t num_rows) {
#if defined(__AVX512F__)
        for (int64_t head = 0; head < stop_head_ - first_head_; ++head)
            for (int64_t r = 0; r < num_rows; ++r)
                widen(&scratch_.q[(head * num_rows_ + first_row + r) * row_steps_], row_steps_,
                      wide_of(head * num_rows + r));
#endif
    }

    Word* wide_of(int64_t row) { return &scratch_.wide_q[(first_wide_row_ + row) * row_steps_ * kQuarterWords]; }

    void scatter(const Member* members, int64_t num_members) {
        for_each_row(members, num_members, [&](int64_t row, int64_t at, int64_t) {
            float factor = 1.0f / sum_lanes(load<Floats>(&scratch_.totals[row * kLanes]));
            float* sums = &scratch_.sums[row * width_];
            put_in_order(sums, head_dim_, T{}, Held<T>{});
            int64_t d = 0;
            for (; d + kLanes <= head_dim_; d += kLanes)
                store_narrow(layer_.output + at + d, load<Floats>(sums + d) * factor);
            for (; d < head_dim_; ++d) narrow(sums[d] * factor, layer_.output + at + d);
        });
    }

    // Attend from rows [first_row, first_row + num_rows) to the positions [start, stop); start cuts key blocks.
    void attend(int64_t first_row, int64_t num_rows, const int32_t* pages, int64_t start, int64_t stop, Ahead next) {
        const bool is_direct = num_rows <= kDirectPasses * kMaxDirectRows && fits_directly<T>(head_dim_);
        if (is_direct) for_each_pass(first_row, num_rows, [&](int64_t row, int64_t rows) { widen_rows(row, rows); });
        for (int64_t block = start; block < stop; block += kKeyBlock) {
            int64_t count = std::min(kKeyBlock, stop - block), following = block + kKeyBlock;
            Ahead ahead = following < stop ? Ahead{pages, following, std::min(following + kKeyBlock, stop)} : next;
            list_far_lines(ahead, is_direct ? num_direct_units(num_rows, count) : num_packed_units(num_rows));
            find_block(pages, block, count);
            if constexpr (kMaxDirectRows > 0) {
                if (is_direct) {
                    find_following(ahead);
                    for_each_pass(first_row, num_rows, [&](int64_t row, int64_t rows_of_pass) {
                        auto run = [&](auto rows) {
                            constexpr int kRows = decltype(rows)::value;
                            if (is_wide()) return attend_directly<kRows, true>(row, block, count);
                            attend_directly<kRows, false>(row, block, count);
                        };
                        with_row_count<kMaxDirectRows>(rows_of_pass, run);
                    });
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

    // List the next block's memory, in the order of addresses where that can be. Args: num_units: of a head of this one.
    void list_far_lines(Ahead ahead, int64_t num_units) {
        far_.clear();
        for_each_run(ahead.pages, ahead.start, ahead.stop, [&](int64_t, int64_t length, const T* keys) {
            add_lines(keys, length);
            add_lines(keys + layer_.kv.value_offset(), length);
        });
        far_.translate();
        far_.start();
        far_.spread((stop_head_ - first_head_) * num_units);
    }

    // Units of work (FarLines) of one head: on `count` positions straight from the pages, or on a packed block.
    int64_t num_direct_units(int64_t num_rows, int64_t count) const {
        return num_passes(num_rows) * (round_up(count, kLanes) + count) * head_dim_ * (int64_t)sizeof(T) / kLineBytes;
    }

    int64_t num_packed_units(int64_t num_rows) const {
        const int64_t num_panels = kKeyBlock / kPanel, num_squares = kKeyBlock / kLanes * (row_words_ / kLanes);
        const int64_t num_tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows, num_sums = is_quartered_ ? 4 : 1;
        const int64_t of_scores = kWidens ? num_tiles * num_panels * num_sums * kSumUnits : 2 * num_panels * row_words_;
        return 8 * num_squares + kKeyBlock + of_scores;
    }

    // Add the wanted heads' keys, or values, of consecutive positions of a page.
    void add_lines(const T* first, int64_t num_positions) {
        const int64_t stride = layer_.kv.num_heads * head_dim_, wanted = (stop_head_ - first_head_) * head_dim_;
        far_.add(first, wanted * sizeof(T), num_positions, stride * sizeof(T));
    }

    // Keys and values of the first head; the others' follow them. Positions past the context are zeros, whatever their
    // slots hold.
    void find_block(const int32_t* pages, int64_t block, int64_t count) {
        const int64_t to_value = layer_.kv.value_offset();
        for_each_run(pages, block, block + count, [&](int64_t position, int64_t length, const T* key) {
            for_each_stretch(position - block, length, key, [&](int64_t place, auto keys) {
                store(keys_ + place, keys);
                store(values_ + place, keys + to_value * sizeof(T));
            });
        });
        const Word* zeros = scratch_.zeros.data();
        for (int64_t i = count; i < kKeyBlock; ++i) {
            keys_[place_of(i)] = zeros;
            values_[place_of(i)] = reinterpret_cast<const T*>(zeros);
        }
    }

    // What follows a block's last keys, its first values, and what follows those, the first keys of the next one.
    void find_following(Ahead ahead) {
        static_assert(kFollowing == kTurn * kTurns);
        std::memcpy(keys_ + kKeyBlock, values_, kFollowing * sizeof *values_);
        std::memcpy(values_ + kKeyBlock, keys_, kFollowing * sizeof *keys_);
        auto add = [&](int64_t position, int64_t length, const T* key) {
            for_each_stretch(position - ahead.start, length, key,
                             [&](int64_t place, auto keys) { store(values_ + kKeyBlock + place, keys); });
        };
        for (int64_t start = ahead.start; start < ahead.stop; start += kKeyBlock / kTurns)
            for_each_run(ahead.pages, start, std::min(start + kTurn, ahead.stop), add);
    }

    // Call function(place, addresses) for `length` positions of a page that lie at `key`, a turn at a time where these
    // have places side by side.
    template <class Function>
    void for_each_stretch(int64_t position, int64_t length, const T* key, Function&& function) const {
        typedef uint64_t Addresses __attribute__((vector_size(kTurn * sizeof(uint64_t))));
        const uint64_t stride = layer_.kv.num_heads * head_dim_ * sizeof(T);
        const Addresses steps = Addresses{0, 1, 2, 3} * stride;
        uint64_t at = reinterpret_cast<uint64_t>(key);
        for (int64_t stop = position + length; position < stop;) {
            if (position % kTurn == 0 && stop - position >= kTurn) {
                function(place_of(position), at + steps);
                position += kTurn, at += kTurn * stride;
            } else {
                function(place_of(position), at);
                ++position, at += stride;
            }
        }
    }

    // Keys become panels of 32 positions, values steps over positions.
    void pack_block(int64_t head, int64_t count) {
        for (int64_t first = 0; first < num_places(count); first += kPanel) {
            Word* panel = &scratch_.keys[first * row_steps_];
            if (is_quartered_) {
                pack_panel<true, kHeldSteps<T>>(keys_ + first, head * row_words_, row_words_, panel, far_);
            } else {
                pack_panel<false, kHeldSteps<T>>(keys_ + first, head * row_words_, row_words_, panel, far_);
            }
        }
        pack_values(values_, head * head_dim_, num_places(count), head_dim_, width_, scratch_.values.data(), far_,
                    Held<T>{});
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

    // Positions of the block that any of the rows sees, from its first on. Rows are in the order of their positions
    // within a member.
    int64_t num_visible(int64_t first, int num_rows, int64_t block, int64_t count) const {
        int64_t visible = 0;
        for (int r = 0; r < num_rows; ++r) visible = std::max(visible, scratch_.positions[first + r] + 1 - block);
        return std::min(visible, count);
    }

    // The same rows of every head, a few positions at a time: so memory is read nearly in the order of its addresses.
    // Weights are made head by head between products: while nothing is read, memory idles.
    template <int kRows, bool kIsWide>
    void attend_directly(int64_t first_row, int64_t block, int64_t count) {
        const int64_t visible = num_visible(first_row, kRows, block, count), num_heads = stop_head_ - first_head_;
        if (visible < kKeyBlock) return attend_partly<kRows>(first_row, block, visible);
        for (int64_t i = 0; i < kKeyBlock; i += kLanes)
            for (int64_t head = 0; head < num_heads; ++head) {
                int64_t row = head * num_rows_ + first_row;
                auto [places, near_head] = near_of<kIsWide>(head, kLanes);
                score_directly<T, kRows>(wide_of(head * kRows), row_words_, keys_ + i, head * row_words_,
                                         keys_ + i + places, near_head * row_words_, scores_of(head * kRows) + i,
                                         kKeyBlock, far_);
                if (i + kLanes < kKeyBlock) continue;
                for (int64_t r = 0; r < kRows; ++r)
                    weigh_row(row + r, block, scores_of(head * kRows + r), weights_of(head * kRows + r));
            }
        for (int64_t i = 0; i < kKeyBlock; i += kValuePositions)
            for (int64_t head = 0; head < num_heads; ++head)
                add_head_directly<kRows, kIsWide>(head, head * num_rows_ + first_row, i, i + kValuePositions);
    }

    // The same for the first `visible` positions of a block. Turns would compute with positions that nobody sees:
    // scores, which are independent of each other, are taken in the order of positions, and of values only the turns
    // that count.
    template <int kRows>
    void attend_partly(int64_t first_row, int64_t block, int64_t visible) {
        if (visible <= 0) return;
        const int64_t num_heads = stop_head_ - first_head_;
        for (int64_t i = 0; i < visible; i += kLanes) {
            const Word* keys[kLanes];
            for (int64_t j = 0; j < kLanes; ++j) keys[j] = keys_[place_of(i + j)];
            for (int64_t head = 0; head < num_heads; ++head) {
                float scores[kRows * kLanes];
                int64_t at = head * row_words_;
                score_directly<T, kRows>(wide_of(head * kRows), row_words_, keys, at, keys, at, scores, kLanes, far_);
                for (int64_t r = 0; r < kRows; ++r)
                    for (int64_t j = 0; j < kLanes; j += kTurn)
                        std::memcpy(scores_of(head * kRows + r) + place_of(i + j), scores + r * kLanes + j,
                                    kTurn * sizeof(float));
            }
        }
        for (int64_t head = 0; head < num_heads; ++head)
            for (int64_t r = 0; r < kRows; ++r)
                weigh_row(head * num_rows_ + first_row + r, block, scores_of(head * kRows + r),
                          weights_of(head * kRows + r));
        for (int64_t place = 0; place < kKeyBlock; place += kTurn)
            for (int64_t head = 0; head < num_heads && kPositionAt[place] < visible; ++head)
                add_head_directly<kRows, false>(head, head * num_rows_ + first_row, place, place + kTurn);
    }

    // What to ask for while num_places of a head are in use: how many places further, of which head. The same of a turn
    // later, where the first cache has room for a turn of all heads, else kNearBytes ahead.
    template <bool kIsWide>
    std::pair<int64_t, int64_t> near_of(int64_t head, int64_t num_places) const {
        if constexpr (!kIsWide) return {kFollowing, head};
        const int64_t num_heads = stop_head_ - first_head_, bytes = num_places * head_dim_ * (int64_t)sizeof(T);
        const int64_t ahead = head + std::max<int64_t>(1, kNearBytes / bytes);
        return ahead < num_heads ? std::pair{(int64_t)0, ahead} : std::pair{num_places, ahead - num_heads};
    }

    bool is_wide() const {
        return (stop_head_ - first_head_) * kFollowing * head_dim_ * (int64_t)sizeof(T) > kMaxTurnBytes;
    }

    // Add the weighted values of positions [start, stop) of the block to the sums of kRows rows.
    template <int kRows, bool kIsWide>
    void add_head_directly(int64_t head, int64_t row, int64_t start, int64_t stop) {
        constexpr int64_t kWeightWords = kKeyBlock / kWordElements<Held<T>>;
        constexpr int kTwoPanels = 2 * kPanelVectors;
        const int64_t num_words = (stop - start + kWordElements<T> - 1) / kWordElements<T>;
        const Word* weights = &scratch_.weights[head * kRows * kWeightWords + start / kWordElements<Held<T>>];
        float* running = &scratch_.sums[row * width_];
        auto [places, near_head] = near_of<kIsWide>(head, kValuePositions);
        const T* const* near = values_ + start + places;
        const int64_t near_at = near_head * head_dim_;
        auto add = [&](auto num_vectors, int64_t d) {
            add_values_directly<T, kRows, decltype(num_vectors)::value>(weights, kWeightWords, values_ + start,
                                                                        head * head_dim_ + d, near, near_at + d,
                                                                        num_words, running + d, width_, far_);
        };
        int64_t d = 0;
        for (; d + 2 * kPanel <= width_; d += 2 * kPanel) add(RowCount<kTwoPanels>{}, d);
        if (d < width_) add(RowCount<kPanelVectors>{}, d);
    }

    template <int kRows>
    void attend_tile(int64_t first, int64_t block, int64_t count) {
        const int64_t visible = num_places(num_visible(first, kRows, block, count));
        if (visible <= 0) return;
        int64_t num_panels = (visible + kPanel - 1) / kPanel;
        for (int64_t p = 0; p < num_panels; ++p) {
            if constexpr (kWidens) {
                score_in_memory<kRows>(first, p);
            } else {
                constexpr bool kIsHalved = kLanes == 4 * kQuarterWords && kRows > kMaxTileRows / 2;
                constexpr int kFirstRows = kIsHalved ? (kRows + 1) / 2 : kRows;
                score_in_registers<kFirstRows>(first, 0, p, [&] { far_.advance<2>(); });
                if constexpr (kFirstRows < kRows) score_in_registers<kRows - kFirstRows>(first, kFirstRows, p, [] {});
            }
        }
        for (int r = 0; r < kRows; ++r) weigh_row(first + r, block, scores_of(r), weights_of(r));
        constexpr int64_t kWeightWords = kKeyBlock / kWordElements<Held<T>>;
        int64_t num_steps = (visible + kWordElements<Held<T>> - 1) / kWordElements<Held<T>>;
        const Word* weights = scratch_.weights.data();
        float* running = &scratch_.sums[first * width_];
        for (int64_t d = 0; d < width_; d += kPanel) {
            Floats sums[kRows][kPanelVectors];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v)
                    sums[r][v] = load<Floats>(running + r * width_ + d + v * kLanes);
            multiply<Held<T>, kRows>(weights, kWeightWords, &scratch_.values[d], width_, num_steps, sums, [] {});
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v) store(running + r * width_ + d + v * kLanes, sums[r][v]);
        }
    }

    // Scores of a tile's rows with a panel of keys. Sums of quarters are added up in memory: with as many steps as they
    // have of widened keys that costs less than to read a panel twice (1.013). Memory is asked for between them.
    template <int kRows>
    void score_in_memory(int64_t first, int64_t p) {
        const int64_t num_steps = is_quartered_ ? row_steps_ / 4 : row_steps_;
        const Word* q = &scratch_.q[first * row_steps_];
        const Word* panel = &scratch_.keys[p * kPanel * row_steps_];
        float* scores = scores_of(0) + p * kPanel;
        for (int64_t step = 0; step < row_steps_; step += num_steps) {
            far_.advance<kSumUnits>();
            Floats sums[kRows][kPanelVectors] = {};
            multiply<Held<T>, kRows>(q + step, row_steps_, panel + step * kPanel, kPanel, num_steps, sums, [] {});
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v) {
                    float* at = scores + r * kKeyBlock + v * kLanes;
                    store(at, step ? load<Floats>(at) + sums[r][v] : sums[r][v]);
                }
        }
    }

    // The same of rows [skip, skip + kRows), all sums in registers: at most half a tile, as they need twice as many.
    template <int kRows, class Each>
    void score_in_registers(int64_t first, int64_t skip, int64_t p, Each&& each_step) {
        const int64_t num_steps = is_quartered_ ? row_steps_ / 4 : row_steps_;
        const Word* q = &scratch_.q[(first + skip) * row_steps_];
        const Word* panel = &scratch_.keys[p * kPanel * row_steps_];
        float* scores = scores_of(skip) + p * kPanel;
        Floats sums[kRows][kPanelVectors] = {};
        multiply<Held<T>, kRows>(q, row_steps_, panel, kPanel, num_steps, sums, each_step);
        for (int64_t step = num_steps; step < row_steps_; step += num_steps) {
            Floats more[kRows][kPanelVectors] = {};
            multiply<Held<T>, kRows>(q + step, row_steps_, panel + step * kPanel, kPanel, num_steps, more, each_step);
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kPanelVectors; ++v) sums[r][v] += more[r][v];
        }
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kPanelVectors; ++v) store(scores + r * kKeyBlock + v * kLanes, sums[r][v]);
    }

    // Turn a row's scores of a block into weights; a new ceiling scales down what was summed before.
    void weigh_row(int64_t row, int64_t block, float* scores, Held<T>* weights) {
        const int64_t position = scratch_.positions[row];
        const int64_t low = layer_.window ? position + 1 - layer_.window - block : 0, high = position + 1 - block;
        float &ceiling = scratch_.ceilings[row], *totals = &scratch_.totals[row * kLanes], factor;
        if (low > 0 || high < kKeyBlock) {
            hide(scores, low, high);
            factor = weigh<T, true>(scores, log2_scale_, ceiling, totals, weights);
        } else {
            factor = weigh<T, false>(scores, log2_scale_, ceiling, totals, weights);
        }
        if (factor == 1.0f) return;
        float* sums = &scratch_.sums[row * width_];
        for (int64_t d = 0; d < width_; d += kLanes) store(sums + d, load<Floats>(sums + d) * factor);
    }

    float* scores_of(int64_t row) { return &scratch_.scores[row * kKeyBlock]; }
    Held<T>* weights_of(int64_t row) { return reinterpret_cast<Held<T>*>(scratch_.weights.data()) + row * kKeyBlock; }

    const AttentionLayer<T>& layer_;
    const int64_t first_head_, stop_head_;
    AttentionScratch& scratch_;
    const int64_t head_dim_, row_words_, row_steps_, width_, rows_per_token_;
    const bool is_quartered_;
    FarLines far_;
    // Behind a block's places, what is read next: asked for while these are in use.
    const Word* keys_[kKeyBlock + kFollowing];
    const T* values_[kKeyBlock + kFollowing];
    int64_t num_rows_ = 0;  // of one head
    int64_t first_wide_row_ = 0;  // of a pass
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
