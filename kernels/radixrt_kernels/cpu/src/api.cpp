// The plain C interface. Everything is checked by the caller (bindings.py) but what only a loop over the data can see.
#include <new>

#include "check.h"
#include "step.h"

using namespace radixrt;

namespace {

// What a function gives back; bindings.py knows the same numbers.
enum Status : int32_t {
    kDone = 0,
    kOutOfMemory = 1,
    kBadTokenId = 2,
    kBadSlot = 3,
    kBadPage = 4,
    kBadRow = 5,
    kBadCounts = 6,
    kNoTiles = 7,
    kWrongProducts = 8,
    kNoMasks = 9,
};

Status check_batch(const Batch& batch, int64_t num_pages, int64_t page_size) {
    if (batch.query_start[0] != 0 || batch.query_start[batch.num_sequences] != batch.num_tokens) return kBadCounts;
    for (int64_t b = 0; b < batch.num_sequences; ++b) {
        int64_t context = batch.context_lens[b];
        if (num_new(batch, b) < 1 || num_new(batch, b) > context || context > batch.num_columns * page_size)
            return kBadCounts;
        for (int64_t i = 0; i * page_size < context; ++i) {
            int32_t page = pages_of(batch, b)[i];
            if (page < 0 || page >= num_pages) return kBadPage;
        }
    }
    return kDone;
}

bool all_below(const int64_t* values, int64_t count, int64_t limit) {
    return std::all_of(values, values + count, [&](int64_t value) { return value >= 0 && value < limit; });
}

// Threads, and what they keep from call to call, as a decoder does from step to step.
struct AttentionTeam {
    explicit AttentionTeam(int num_threads) : team(num_threads), scratch(num_threads) {}

    Team team;
    std::vector<AttentionScratch> scratch;
    AttentionPlan plan;
};

// The layers of a KV store [num_pages, num_layers, 2, page_size, G, D], the first two dimensions strided.
struct Layers {
    void* data;
    int64_t count, page_stride, stride, page_size, num_heads, head_dim;
};

template <class T>
void attend_layers(const Layers& layers, const Batch& batch, const void* q, void* output, int64_t num_heads,
                   int64_t window, float scale, AttentionTeam& own) {
    const int64_t size = batch.num_tokens * num_heads * layers.head_dim;
    own.plan.build(batch, layers.page_size, num_heads / layers.num_heads, window == 0, own.team.num_threads());
    own.team.run([&](int thread) {
        for (int64_t i = 0; i < layers.count; ++i) {
            T* data = static_cast<T*>(layers.data) + i * layers.stride;
            KVLayer<T> kv{data, layers.page_stride, layers.page_size, layers.num_heads, layers.head_dim};
            const T* layer_q = static_cast<const T*>(q) + i * size;
            AttentionLayer<T> layer{layer_q, static_cast<T*>(output) + i * size, kv, num_heads, window, scale};
            attend_all(own.team, thread, layer, own.plan, own.scratch[thread]);
        }
    });
}

}  // namespace

extern "C" {

// Whether the CPU has the tiles that this build takes for granted.
int32_t rt_has_tiles() {
#if defined(RADIXRT_HAS_TILES)
    return amx::has_tiles();
#else
    return true;
#endif
}

// To be called once per process before all else: asks the system for what this build's instructions need, and tries
// them. Gives a status, or an errno, negated, of the system's refusal.
int32_t rt_prepare() {
#if defined(RADIXRT_HAS_TILES)
    if (int error = amx::request_permission()) return -error;
    if (!rt_has_tiles()) return kNoTiles;
    try {
        if (!products_are_right()) return kWrongProducts;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
#endif
    return kDone;
}

// Words of a packed weight: see pack_weight. is_layer: of a layer, whose panels may be in another type (half_product.h).
int64_t rt_packed_words(int64_t num_outputs, int64_t num_inputs, int32_t is_bfloat16, int32_t paired,
                        int32_t is_layer) {
    constexpr int kHalf = kPanel / 2;
    int64_t num_panels = paired ? (num_outputs / 2 + kHalf - 1) / kHalf : (num_outputs + kPanel - 1) / kPanel;
    int64_t num_steps = is_bfloat16 ? num_inputs / 2 : num_inputs;
#if defined(RADIXRT_HAS_HALVES)
    if (is_bfloat16 && is_layer) return num_panels * half_panel_words(num_steps);
#endif
    return num_panels * kPanel * num_steps;
}

void rt_pack(const void* weight, int64_t num_outputs, int64_t num_inputs, int32_t is_bfloat16, int32_t paired,
             int32_t is_layer, uint32_t* panels) {
    if (!is_bfloat16) return pack_weight(static_cast<const float*>(weight), num_outputs, num_inputs, paired, panels);
    const BFloat16* source = static_cast<const BFloat16*>(weight);
#if defined(RADIXRT_HAS_HALVES)
    if (is_layer) return pack_halves(source, num_outputs, num_inputs, paired, panels);
#endif
    pack_weight(source, num_outputs, num_inputs, paired, panels);
}

// Words and bytes of bounds of a rough weight (rough.h); 0 words: this build has none, or none with so many inputs.
void rt_rough_size(int64_t num_outputs, int64_t num_inputs, int64_t* num_words, int64_t* num_bound_bytes) {
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    const bool has = kHasRough && num_inputs <= kMaxRoughInputs;
    *num_words = has ? num_panels * rough_steps(num_inputs) * kPanel : 0;
    *num_bound_bytes = has ? num_panels * (int64_t)sizeof(RoughPanel) : 0;
}

void rt_pack_rough(const void* weight, int64_t num_outputs, int64_t num_inputs, int32_t is_bfloat16, uint32_t* panels,
                   void* bounds) {
#if defined(RADIXRT_HAS_ROUGH)
    RoughPanel* to = static_cast<RoughPanel*>(bounds);
    if (is_bfloat16) {
        pack_rough(static_cast<const BFloat16*>(weight), num_outputs, num_inputs, panels, to);
    } else {
        pack_rough(static_cast<const float*>(weight), num_outputs, num_inputs, panels, to);
    }
#endif
}

void* rt_team_create(int32_t num_threads) { return new (std::nothrow) AttentionTeam(num_threads); }
void rt_team_destroy(void* team) { delete static_cast<AttentionTeam*>(team); }

// Attend of several layers, one after another, planned once as in a step; the new tokens' keys and values are in their
// pages. q, output: [num_layers, T, H, D].
int32_t rt_attend(void* team, void* kv, int64_t num_pages, int64_t num_layers, int64_t page_stride,
                  int64_t layer_stride, int64_t page_size, const Batch* batch, const void* q, void* output,
                  int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t window, float scale,
                  int32_t is_bfloat16) {
    if (Status status = check_batch(*batch, num_pages, page_size)) return status;
    const Layers layers{kv, num_layers, page_stride, layer_stride, page_size, num_kv_heads, head_dim};
    auto attend = is_bfloat16 ? attend_layers<BFloat16> : attend_layers<float>;
    try {
        attend(layers, *batch, q, output, num_heads, window, scale, *static_cast<AttentionTeam*>(team));
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kDone;
}

// Copies shape and layer table; the weights themselves must outlive the model. Gives null without memory.
void* rt_model_create(const Shape* shape, const Weights* weights, int32_t is_bfloat16, int32_t num_threads) {
    if (is_bfloat16) return new (std::nothrow) Decoder<BFloat16>(*shape, *weights, num_threads);
    return new (std::nothrow) Decoder<float>(*shape, *weights, num_threads);
}

void rt_model_destroy(void* model) { delete static_cast<Model*>(model); }

int32_t rt_model_step(void* model, const Shape* shape, const Inputs* inputs, const Store* store,
                      const Outputs* outputs) {
    const Batch& batch = inputs->batch;
    if (!all_below(inputs->token_ids, batch.num_tokens, shape->vocab_size)) return kBadTokenId;
    if (!all_below(inputs->slots, batch.num_tokens, store->num_pages * store->page_size)) return kBadSlot;
    if (!all_below(inputs->sample_rows, inputs->num_sampled, batch.num_tokens)) return kBadRow;
    if (Status status = check_batch(batch, store->num_pages, store->page_size)) return status;
    try {
        if (!static_cast<Model*>(model)->step(*inputs, *store, *outputs)) return kNoMasks;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kDone;
}

// What is drawn is checked by the caller (draw.py).
int32_t rt_model_draw(void* model, const Draw* draws, int64_t num_draws, int64_t num_token_ids, int64_t* token_ids,
                      float* largest) {
    try {
        static_cast<Model*>(model)->draw(draws, num_draws, num_token_ids, token_ids, largest);
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kDone;
}

// Read num_bytes (a multiple of 64) as fast as one thread can: the floor of what is bound by memory.
uint64_t rt_read(const void* data, int64_t num_bytes) {
    Words sums[4] = {};
    const char* bytes = static_cast<const char*>(data);
    for (int64_t i = 0; i + (int64_t)sizeof sums <= num_bytes; i += sizeof sums)
        for (int j = 0; j < 4; ++j) sums[j] ^= load<Words>(bytes + i + j * sizeof(Words));
    return (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
}

}  // extern "C"
