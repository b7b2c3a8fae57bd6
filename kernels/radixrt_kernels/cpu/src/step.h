// One step of the decoder: token ids -> keys and values in their pages, and the wanted rows' likeliest tokens and logits.
//
//     hidden [T, E] float32 -norm-> normed -qkv-> [T, (H + 2 G) D] float32 -rotate-> q, and k, v into their slots
//            -attend-> [T, H D] -output-> hidden += -norm-> normed -gate_up, silu-> [T, I] -down-> hidden +=
//
// Inputs of products have the weights' type, sums are float32. Threads meet after every arrow. In the last layer only
// the rows whose logits are wanted go on once keys and values are in their slots.
#pragma once

#include <memory>
#include <mutex>

#include "aligned.h"
#include "attention.h"
#include "columns.h"
#include "draw.h"
#include "gemm.h"
#include "likeliest.h"
#include "rough.h"
#include "rows.h"
#include "select.h"

namespace radixrt {

struct Shape {
    int64_t vocab_size, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, num_layers;
    double norm_epsilon, rope_magnitude;
    const float* inverse_frequencies;  // [D / 2]
};

// Packed weights (pack.h); vectors are float32, biases padded with zeros to whole panels. Null: not there.
struct Layer {
    const float* attention_norm;
    const Word* qkv;
    const float* qkv_bias;
    const float* qk_norm;  // [H + G, D]
    const Word* output;
    const float* output_bias;
    const float* mlp_norm;
    const Word* gate_up;  // paired
    const float* gate_up_bias;
    const Word* down;
    const float* down_bias;
    int64_t window;  // 0 = none
};

struct Weights {
    const Word* embedding;
    const Word* head;
    RoughWeight rough_head;
    const float* final_norm;
    const Layer* layers;
};

// By wanted row the tokens that can be drawn, a bit each; null: all.
using Masks = const Word* const*;
// Asked for them once, on the caller's thread, when nothing but the head is left: they can be made beside the layers. Writes
// their address as its last act; where it has not, there are none, and the step fails.
using GetMasks = void (*)();

struct Inputs {
    Batch batch;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    int64_t num_sampled;
    const int64_t* sample_rows;
    int64_t num_token_ids;  // tokens that can be drawn, the first of the vocabulary
    GetMasks get_masks;     // null: all of them in every row
    const Masks* masks;     // what get_masks writes; null before
};

// Of each row whose logits are wanted.
struct Outputs {
    float* logits;       // [num_sampled, V]; null: not wanted
    int64_t* token_ids;  // [num_sampled]: the likeliest that can be drawn; of equal ones the first; 0 where none can be
    float* largest;      // [num_sampled]: its logit
};

// The KV store [num_pages, L, 2, page_size, G, D].
struct Store {
    void* data;
    int64_t num_pages, page_size;
};

class Model {
public:
    virtual ~Model() = default;
    // False: there were no masks. Changes: the store at inputs.slots, and what outputs point to.
    virtual bool step(const Inputs& inputs, const Store& store, const Outputs& outputs) = 0;
    // token_ids, largest [num_draws]. Changes: these only.
    virtual void draw(const Draw* draws, int64_t num_draws, int64_t num_token_ids, int64_t* token_ids,
                      float* largest) = 0;
};

// Owns the threads and the room for a step's rows, never the weights. One step at a time: others wait.
template <class T>
class Decoder final : public Model {
public:
    Decoder(const Shape& shape, const Weights& weights, int num_threads)
        : shape_(shape),
          weights_(weights),
          layers_(weights.layers, weights.layers + shape.num_layers),
          frequencies_(shape.inverse_frequencies, shape.inverse_frequencies + shape.head_dim / 2),
          team_(num_threads),
          scratch_(num_threads),
          rooms_(num_threads),
          products_(num_threads) {}

    bool step(const Inputs& inputs, const Store& store, const Outputs& outputs) override {
        std::lock_guard<std::mutex> guard(mutex_);
        inputs_ = inputs;
        store_ = store;
        reserve(inputs.batch.num_tokens, inputs.num_sampled);
        int64_t rows_per_token = shape_.num_heads / shape_.num_kv_heads;
        const int num_threads = team_.num_threads();
        full_plan_.build(inputs.batch, store.page_size, rows_per_token, true, num_threads);
        windowed_plan_.build(inputs.batch, store.page_size, rows_per_token, false, num_threads);
        sampled_.choose(inputs.batch, inputs.sample_rows, inputs.num_sampled);
        last_plan_.build(sampled_.batch(), store.page_size, rows_per_token, !layers_.back().window, num_threads);
        columns_.choose(inputs.num_token_ids, nullptr);
        has_masks_ = true;
        likeliest_.begin(num_threads, inputs.num_sampled);
        begin_search(!outputs.logits);
        team_.run([&](int thread) { run(thread, outputs.logits); });
        likeliest_.write(outputs.token_ids, outputs.largest);
        return has_masks_;
    }

    void draw(const Draw* draws, int64_t num_draws, int64_t num_token_ids, int64_t* token_ids,
              float* largest) override {
        std::lock_guard<std::mutex> guard(mutex_);
        for (DrawRoom& room : rooms_) room.reserve(num_token_ids);
        team_.run([&](int thread) {
            team_.for_each(thread, num_draws, [&](int64_t i) {
                token_ids[i] = rooms_[thread].draw(draws[i], num_token_ids, largest + i);
            });
        });
    }

private:
    // How the layers' panels are multiplied, and the head's. Those of head and embedding are T: the head's bounds (rough.h) are
    // of float32 sums, and rows of the embedding are read.
    static constexpr bool kIsHalved = kHasHalves && std::is_same_v<T, BFloat16>;
    using Panel = std::conditional_t<kIsHalved, Half, T>;
    using HeadPanel = std::conditional_t<kIsHalved, Wide, T>;

    // What goes on from phase to phase.
    struct Rows {
        float* hidden;  // [count, E], padded
        const T* q;     // [count, H D], from where attention has begun
        int64_t count;
    };

    int64_t steps(int64_t num_inputs) const { return num_inputs / kWordElements<T>; }
    int64_t num_qkv() const { return (shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_dim; }
    int64_t num_attended() const { return shape_.num_heads * shape_.head_dim; }
    static const Word* words(const Aligned<T>& rows) { return reinterpret_cast<const Word*>(rows.data()); }
    static int64_t panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

    void reserve(int64_t num_tokens, int64_t num_sampled) {
        if (num_sampled > num_sampled_reserved_) {
            num_sampled_reserved_ = num_sampled;
            sampled_hidden_.resize(num_sampled * round_up(shape_.hidden_size, kPanel));
            sampled_q_.resize(num_sampled * num_attended());
        }
        int64_t num_rows = std::max(num_tokens, num_sampled);
        if (num_rows <= num_reserved_) return;
        num_reserved_ = num_rows;
        hidden_.resize(num_rows * round_up(shape_.hidden_size, kPanel));
        normed_.resize(num_rows * shape_.hidden_size);
        qkv_.resize(num_rows * round_up(num_qkv(), kPanel));
        q_.resize(num_rows * num_attended());
        attended_.resize(num_rows * num_attended());
        activated_.resize(num_rows * shape_.intermediate_size);
        cosine_.resize(num_rows * frequencies_.size());
        sine_.resize(num_rows * frequencies_.size());
    }

    void run(int thread, float* logits) {
        embed(thread);
        Rows rows{hidden_.data(), q_.data(), inputs_.batch.num_tokens};
        for (int64_t i = 0; i < shape_.num_layers; ++i) {
            const Layer& layer = layers_[i];
            const bool is_last = i + 1 == shape_.num_layers;
            KVLayer<T> kv = kv_layer(i);
            norm(thread, layer.attention_norm, rows);
            project_qkv(thread, layer);
            rotate_and_write(thread, layer, kv);
            if (is_last) rows = take_sampled(thread);
            const AttentionPlan& plan = is_last ? last_plan_ : layer.window ? windowed_plan_ : full_plan_;
            float scale = 1.0f / std::sqrt((float)shape_.head_dim);
            AttentionLayer<T> attention{rows.q, attended_.data(), kv, shape_.num_heads, layer.window, scale};
            attend_all(team_, thread, attention, plan, scratch_[thread]);
            add_product(thread, words(attended_), num_attended(), layer.output, layer.output_bias, rows);
            norm(thread, layer.mlp_norm, rows);
            activate(thread, layer, rows.count);
            add_product(thread, words(activated_), shape_.intermediate_size, layer.down, layer.down_bias, rows);
        }
        norm(thread, weights_.final_norm, rows);
        if (inputs_.get_masks) team_.once(thread, [&] { take_masks(); });
        if (has_masks_ && (!searches_ || !search_head(thread))) project_head(thread, logits);
        products_[thread].release();
    }

    void take_masks() {
        inputs_.get_masks();
        has_masks_ = *inputs_.masks;
        columns_.choose(inputs_.num_token_ids, *inputs_.masks);
    }

    Rows take_sampled(int thread) {
        int64_t width = round_up(shape_.hidden_size, kPanel);
        team_.for_each(thread, inputs_.num_sampled, [&](int64_t row) {
            int64_t source = inputs_.sample_rows[row];
            std::copy_n(&hidden_[source * width], width, &sampled_hidden_[row * width]);
            std::copy_n(&q_[source * num_attended()], num_attended(), &sampled_q_[row * num_attended()]);
        });
        return {sampled_hidden_.data(), sampled_q_.data(), inputs_.num_sampled};
    }

    KVLayer<T> kv_layer(int64_t index) const {
        int64_t layer_elements = 2 * store_.page_size * shape_.num_kv_heads * shape_.head_dim;
        T* data = static_cast<T*>(store_.data) + index * layer_elements;
        int64_t page_stride = shape_.num_layers * layer_elements;
        return {data, page_stride, store_.page_size, shape_.num_kv_heads, shape_.head_dim};
    }

    void embed(int thread) {
        int64_t width = round_up(shape_.hidden_size, kPanel), half = frequencies_.size();
        team_.for_each(thread, inputs_.batch.num_tokens, [&](int64_t row) {
            unpack_row<T>(weights_.embedding, steps(shape_.hidden_size), inputs_.token_ids[row], shape_.hidden_size,
                          &hidden_[row * width]);
            for (int64_t i = 0; i < half; ++i) {
                // float32, as the models were trained
                float angle = (float)inputs_.positions[row] * frequencies_[i];
                cosine_[row * half + i] = std::cos(angle) * (float)shape_.rope_magnitude;
                sine_[row * half + i] = std::sin(angle) * (float)shape_.rope_magnitude;
            }
        });
    }

    // hidden -> normed
    void norm(int thread, const float* weight, const Rows& rows) {
        int64_t width = round_up(shape_.hidden_size, kPanel);
        team_.for_each(thread, rows.count, [&](int64_t row) {
            normalize(rows.hidden + row * width, weight, shape_.hidden_size, shape_.norm_epsilon,
                      &normed_[row * shape_.hidden_size]);
        });
    }

    void project_qkv(int thread, const Layer& layer) {
        int64_t num_steps = steps(shape_.hidden_size), width = round_up(num_qkv(), kPanel);
        Weight weight{layer.qkv, panels(num_qkv()), num_steps};
        Target target{qkv_.data(), 4 * width, 4 * kPanel};
        const float* bias = layer.qkv_bias;
        multiply_all<Panel>(team_, thread, products_[thread], words(normed_), num_steps, inputs_.batch.num_tokens, weight,
                        target,
                        [&](int64_t row, int64_t panel, const Floats* sums) {
                            for (int v = 0; v < kPanelVectors; ++v) {
                                int64_t at = panel * kPanel + v * kLanes;
                                Floats sum = bias ? sums[v] + load<Floats>(bias + at) : sums[v];
                                radixrt::store(&qkv_[row * width + at], sum);
                            }
                        });
    }

    // heads of a row of qkv:  [0, H) queries | [H, H + G) keys | [H + G, H + 2 G) values
    void rotate_and_write(int thread, const Layer& layer, const KVLayer<T>& kv) {
        int64_t head_dim = shape_.head_dim, num_heads = shape_.num_heads, num_kv_heads = shape_.num_kv_heads;
        int64_t width = round_up(num_qkv(), kPanel), half = frequencies_.size();
        team_.for_each(thread, inputs_.batch.num_tokens, [&](int64_t row) {
            float* heads = &qkv_[row * width];
            const float *cosine = &cosine_[row * half], *sine = &sine_[row * half];
            int64_t page = inputs_.slots[row] / kv.page_size, offset = inputs_.slots[row] % kv.page_size;
            for (int64_t head = 0; head < num_heads + num_kv_heads; ++head) {
                float* x = heads + head * head_dim;
                const float* weight = layer.qk_norm ? layer.qk_norm + head * head_dim : nullptr;
                float factor = weight ? inverse_rms(x, head_dim, shape_.norm_epsilon) : 1.0f;
                T* target = head < num_heads ? &q_[row * num_attended() + head * head_dim]
                                             : kv.key(page, offset, head - num_heads);
                rotate(x, weight, factor, cosine, sine, head_dim, target);
            }
            const float* values = heads + (num_heads + num_kv_heads) * head_dim;
            narrow_row(values, num_kv_heads * head_dim, kv.key(page, offset, 0) + kv.value_offset());
        });
    }

    // hidden += inputs times weight, and bias
    void add_product(int thread, const Word* inputs, int64_t num_inputs, const Word* panel_words, const float* bias,
                     const Rows& rows) {
        int64_t num_steps = steps(num_inputs), width = round_up(shape_.hidden_size, kPanel);
        Weight weight{panel_words, panels(shape_.hidden_size), num_steps};
        Target target{rows.hidden, 4 * width, 4 * kPanel};
        multiply_all<Panel>(team_, thread, products_[thread], inputs, num_steps, rows.count, weight, target,
                        [&](int64_t row, int64_t panel, const Floats* sums) {
                            for (int v = 0; v < kPanelVectors; ++v) {
                                int64_t at = panel * kPanel + v * kLanes;
                                Floats sum = bias ? sums[v] + load<Floats>(bias + at) : sums[v];
                                float* target = rows.hidden + row * width + at;
                                radixrt::store(target, load<Floats>(target) + sum);
                            }
                        });
    }

    // normed -> activated: silu(gate) * up. A panel has 16 gates, then their 16 ups.
    void activate(int thread, const Layer& layer, int64_t num_rows) {
        constexpr int kHalf = kPanel / 2, kHalfVectors = kPanelVectors / 2;
        int64_t num_steps = steps(shape_.hidden_size), size = shape_.intermediate_size;
        Weight weight{layer.gate_up, (size + kHalf - 1) / kHalf, num_steps};
        Target target{activated_.data(), size * (int64_t)sizeof(T), kHalf * (int64_t)sizeof(T)};
        const float* bias = layer.gate_up_bias;
        multiply_all<Panel>(team_, thread, products_[thread], words(normed_), num_steps, num_rows, weight, target,
                        [&](int64_t row, int64_t panel, const Floats* sums) {
                            for (int v = 0; v < kHalfVectors; ++v) {
                                Floats gate = sums[v], up = sums[kHalfVectors + v];
                                if (bias) {
                                    gate += load<Floats>(bias + panel * kPanel + v * kLanes);
                                    up += load<Floats>(bias + panel * kPanel + kHalf + v * kLanes);
                                }
                                int64_t at = panel * kHalf + v * kLanes;
                                store_some(silu(gate) * up, &activated_[row * size + at], size - at);
                            }
                        });
    }

    Weight head() const { return {weights_.head, panels(shape_.vocab_size), steps(shape_.hidden_size)}; }

    void project_head(int thread, float* logits) {
        int64_t size = shape_.vocab_size;
        Target target{logits, 4 * size, logits ? 4 * kPanel : 0};
        multiply_all<HeadPanel>(team_, thread, products_[thread], words(normed_), steps(shape_.hidden_size),
                                inputs_.num_sampled, head(), target,
                                [&](int64_t row, int64_t panel, const Floats* sums) {
                            likeliest_.see(thread, row, panel, columns_.lanes(row, panel), sums);
                            if (!logits) return;
                            for (int v = 0; v < kPanelVectors; ++v) {
                                int64_t at = panel * kPanel + v * kLanes;
                                store_some(sums[v], logits + row * size + at, size - at);
                            }
                        });
    }

#if defined(RADIXRT_HAS_ROUGH)
    // Panels for one row at a time cost some eight times as much as for many rows.
    static constexpr int64_t kDearShare = 8;

    void begin_search(bool is_enough) {
        searches_ = is_enough && weights_.rough_head.panels && patience_.may_search();
        if (searches_) search_.begin(team_.num_threads(), inputs_.num_sampled, shape_.hidden_size);
    }

    // What project_head finds, computing few of its outputs; false: too many may be the largest, and nothing is done.
    bool search_head(int thread) {
        const int64_t num_rows = inputs_.num_sampled, num_steps = steps(shape_.hidden_size);
        const Weight exact = head(), rough{weights_.rough_head.panels, exact.num_panels, search_.num_steps()};
        team_.for_each(thread, num_rows,
                       [&](int64_t row) { search_.take_row(row, &normed_[row * shape_.hidden_size]); });
        WordProduct<Byte> product(search_.words(), search_.row_stride(), rough.num_steps);
        multiply_all_vectors(team_, thread, product, num_rows, rough, Target{},
                             [&](int64_t row, int64_t panel, const Floats* sums) {
                                 search_.see(thread, row, panel, columns_.lanes(row, panel), weights_.rough_head, sums);
                             });
        const int64_t num_open = search_.num_open(num_rows);
        if (thread == 0) patience_.learn(2 * kDearShare * num_open <= num_rows * exact.num_panels);
        if (kDearShare * num_open > num_rows * exact.num_panels) return false;
        auto one_row = product_of(HeadPanel{}, products_[thread], words(normed_), num_steps, num_steps);
        team_.for_each(thread, num_rows, [&](int64_t row) {
            one_row.take(row, row + 1);
            search_.for_each_open(row, [&](int64_t panel) {
                Floats sums[1][kPanelVectors];
                one_row.template multiply<1>(0, exact.panels + panel * num_steps * kPanel, sums, NextLines{});
                likeliest_.see(thread, row, panel, columns_.lanes(row, panel), sums[0]);
            });
        });
        return true;
    }
#else
    void begin_search(bool) {}
    bool search_head(int) { return false; }
#endif

    // Store the first `count` lanes, at most all.
    template <class Element>
    static void store_some(Floats x, Element* target, int64_t count) {
        if (count >= kLanes) return store_narrow(target, x);
        for (int64_t i = 0; i < count; ++i) narrow(x[i], target + i);
    }

    const Shape shape_;
    const Weights weights_;
    const std::vector<Layer> layers_;
    const std::vector<float> frequencies_;
    Team team_;
    std::vector<AttentionScratch> scratch_;
    std::vector<DrawRoom> rooms_;
    std::vector<ProductRoom> products_;
    std::mutex mutex_;
    Inputs inputs_{};
    Store store_{};
    AttentionPlan full_plan_, windowed_plan_, last_plan_;
    Selection sampled_;
    Columns columns_;
    bool has_masks_ = true;  // or needs none
    Likeliest likeliest_;
#if defined(RADIXRT_HAS_ROUGH)
    RoughSearch search_;
    Patience patience_;
#endif
    bool searches_ = false;  // in this step
    int64_t num_reserved_ = 0, num_sampled_reserved_ = 0;
    std::vector<float> hidden_, sampled_hidden_, qkv_, cosine_, sine_;
    Aligned<T> normed_, q_, sampled_q_, attended_, activated_;
};

}  // namespace radixrt
