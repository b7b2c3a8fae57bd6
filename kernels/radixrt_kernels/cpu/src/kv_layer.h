// What attention reads and writes in one layer.
#pragma once

#include <cstdint>

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

// The positions that are read next: their memory is asked for while the block before them is in use.
struct Ahead {
    const int32_t* pages = nullptr;
    int64_t start = 0, stop = 0;
};

}  // namespace radixrt
