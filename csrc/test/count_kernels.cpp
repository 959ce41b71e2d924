// Runs each kernel of a table on small data, for tests/kernels/test_codegen_guard.py, which counts their instructions:
//
//   valgrind --tool=callgrind --dump-before=potok_mark count_kernels avx2
//
// potok_mark() is called before and after the counted part of every case. Prints a line a case, in order: name, work.
// Work is multiply-adds, or elements where there are none.
#include <stdio.h>
#include <string.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/single_linear.h"
#include "kernels/table.h"
#include "runtime/isa.h"

extern "C" __attribute__((noinline)) void potok_mark() {
    __asm__ volatile("");
}

namespace potok {
namespace {

constexpr int kRepeat = 8;

// Small whole numbers in no order.
template <class T>
std::vector<T> numbers(size_t n, unsigned modulus) {
    std::vector<T> v(n);
    unsigned state = 1;
    for (T& x : v) {
        state = state * 1664525 + 1013904223;
        x = (T)((state >> 16) % modulus);
    }
    return v;
}

void count(const std::string& name, double work, const std::function<void()>& run) {
    printf("%s %.0f\n", name.c_str(), work * kRepeat);
    run();  // once uncounted: symbols are bound, pages are there
    potok_mark();
    for (int i = 0; i < kRepeat; i++) run();
    potok_mark();
}

void count_linear(const Kernels& kernels, const char* format, Source source, Act act, int rows) {
    constexpr int n = 64, k = 512;
    const std::vector<uint8_t> weight = numbers<uint8_t>(n * source_row_bytes(source, k), 0x3c);
    const std::vector<float> x = numbers<float>(rows * k, 9);
    std::vector<float> out(rows * n);
    const SingleLinear linear(kernels, source, act, weight.data(), n, k);
    Activations activations(kernels, x.data(), rows, k);
    const char* acts[] = {"f32", "a8", "a16"};
    count(std::string("linear-") + format + "-" + acts[(int)act] + "-" + std::to_string(rows), (double)rows * n * k,
          [&] { linear.run(activations, rows, out.data(), 1); });
}

void count_attention(const Kernels& kernels, const char* name, KvType type, int group, int rows) {
    constexpr int head_dim = 64, block_size = 32, context = 256, blocks = context / block_size;
    const size_t stride = kv_head_bytes(type, block_size, head_dim);
    const std::vector<uint8_t> kv = numbers<uint8_t>(blocks * stride, 0x3c);
    const std::vector<float> q = numbers<float>((size_t)rows * group * head_dim, 3);
    std::vector<float> out(q.size()), scratch(attention_scratch_floats(rows * group, head_dim));
    std::vector<int32_t> table(blocks), row_numbers(rows), positions(rows);
    for (int r = 0; r < rows; r++) {
        row_numbers[r] = r;
        positions[r] = context - rows + r;
    }
    for (int b = 0; b < blocks; b++) table[b] = blocks - 1 - b;
    AttentionTask t{};
    t.q = q.data();
    t.ld_q = t.ld_out = group * head_dim;
    t.kv = kv.data();
    t.kv_type = type;
    t.block_stride = stride;
    t.blocks = table.data();
    t.block_size = block_size;
    t.head_dim = head_dim;
    t.num_kv_heads = 1;
    t.group = group;
    t.rows = row_numbers.data();
    t.positions = positions.data();
    t.num_rows = rows;
    t.end = context;
    t.out = out.data();
    t.scratch = scratch.data();
    double pairs = 0;
    for (int r = 0; r < rows; r++) pairs += positions[r] + 1;
    count(name, 2 * pairs * group * head_dim, [&] { kernels.attention(t); });
}

void count_rows(const Kernels& kernels) {
    constexpr int cols = 1536;
    const std::vector<float> x = numbers<float>(cols, 9), weight = numbers<float>(cols, 5);
    std::vector<float> out(cols);
    Integers<int8_t> a8(1, cols, false);
    Integers<int16_t> a16(1, cols, false);
    count("rms-norm", cols, [&] { kernels.rms_norm(x.data(), weight.data(), cols, 1e-5f, out.data()); });
    count("quantize-a8", cols, [&] { kernels.quantize_a8(x.data(), cols, a8.view(), 0); });
    count("quantize-a16", cols, [&] { kernels.quantize_a16(x.data(), cols, a16.view(), 0); });
    count("swiglu", cols, [&] { kernels.swiglu(x.data(), weight.data(), cols, out.data()); });
}

void count_sampling(const Kernels& kernels, const char* name, float temperature, int top_k, float top_p) {
    constexpr int vocab = 8192;
    std::vector<float> logits = numbers<float>(padded_vocab(vocab), 1000);
    for (float& x : logits) x /= 50;
    std::vector<uint8_t> scratch(sample_scratch_bytes(vocab) + 64);
    SampleRow row{};
    row.temperature = temperature;
    row.top_k = top_k;
    row.top_p = top_p;
    row.repetition = 1;
    row.num_logprobs = -1;
    SampleOut out{};
    void* aligned = scratch.data() + (64 - (size_t)scratch.data() % 64);
    count(name, vocab, [&] { kernels.sample_row(logits.data(), vocab, row, out, aligned); });
}

int run(const char* isa) {
    const Kernels& kernels = kernels_of(isa);
    const struct {
        const char* name;
        Source source;
    } integer[] = {{"q4_0", Source::Q4_0}, {"q4_1", Source::Q4_1}, {"q5_0", Source::Q5_0},
                   {"q5_1", Source::Q5_1}, {"q4_k", Source::Q4_K}, {"q5_k", Source::Q5_K}};
    for (const auto& f : integer) {
        count_linear(kernels, f.name, f.source, Act::A8, 4);
        count_linear(kernels, f.name, f.source, Act::A16, 4);
    }
    count_linear(kernels, "q4_1", Source::Q4_1, Act::A8, 1);
    count_linear(kernels, "q2_k", Source::Q2_K, Act::A8, 4);
    count_linear(kernels, "q2_k", Source::Q2_K, Act::A8, 32);
    count_linear(kernels, "q2_k", Source::Q2_K, Act::A16, 4);
    count_linear(kernels, "q2_k", Source::Q2_K, Act::A16, 32);
    count_linear(kernels, "iq4_nl", Source::IQ4_NL, Act::A16, 4);
    count_linear(kernels, "iq4_nl", Source::IQ4_NL, Act::A16, 32);
    count_linear(kernels, "iq4_xs", Source::IQ4_XS, Act::A16, 4);
    count_linear(kernels, "iq4_xs", Source::IQ4_XS, Act::A16, 32);
    count_linear(kernels, "listed", Source::Listed, Act::A16, 4);
    count_linear(kernels, "listed", Source::Listed, Act::A16, 32);
    count_linear(kernels, "q8_0", Source::Q8_0, Act::A16, 4);
    count_linear(kernels, "q8_0", Source::Q8_0, Act::A16, 32);
    count_linear(kernels, "q6_k", Source::Q6_K, Act::A16, 4);
    count_linear(kernels, "q6_k", Source::Q6_K, Act::A16, 32);
    count_linear(kernels, "f16", Source::F16, Act::F32, 4);
    count_linear(kernels, "bf16", Source::BF16, Act::F32, 4);
    count_linear(kernels, "f32", Source::F32, Act::F32, 4);
    // Enough rows to unpack a panel for.
    for (const Act act : {Act::A8, Act::A16}) {
        count_linear(kernels, "q4_1", Source::Q4_1, act, 32);
        count_linear(kernels, "q5_0", Source::Q5_0, act, 32);
        count_linear(kernels, "q5_k", Source::Q5_K, act, 32);
    }
    count_linear(kernels, "bf16", Source::BF16, Act::F32, 32);
    count_linear(kernels, "f32", Source::F32, Act::F32, 32);
    count_attention(kernels, "decode-f16", KvType::F16, 3, 1);
    count_attention(kernels, "decode-f32", KvType::F32, 3, 1);
    count_attention(kernels, "decode-i8", KvType::I8, 3, 1);
    count_attention(kernels, "prompt-f16", KvType::F16, 3, 16);
    count_attention(kernels, "prompt-i8", KvType::I8, 3, 16);
    count_rows(kernels);
    count_sampling(kernels, "sample-greedy", 0, 0, 1);
    count_sampling(kernels, "sample-temperature", 1, 0, 1);
    count_sampling(kernels, "sample-top-k", 1, 40, 0.95f);
    count_sampling(kernels, "sample-top-p", 1, 0, 0.95f);
    return 0;
}

}  // namespace
}  // namespace potok

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: count_kernels ISA\n");
        return 2;
    }
    return potok::run(argv[1]);
}
