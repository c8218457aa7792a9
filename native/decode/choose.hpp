// The choice of a token from its scores, on the pool: the likeliest, or one drawn as torch draws on the CPU.
//
// torch.multinomial divides the probabilities by exponentially distributed numbers and takes the greatest quotient.
// The numbers are -log(1 - u), u of 53 bits from two words of a Mersenne twister, one after the other; a vocabulary of
// 150,000 takes torch 3 ms. Here the twister runs in vectors, and a logarithm is only taken where a quotient may be the
// greatest: -log(1 - u) is never below u.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktinject::decode {

// tokens [rows] = where scores [rows, n] are greatest, the first of those that tie.
void choose_greatest(const float* scores, int rows, int n, int64_t* tokens);

// Bytes of torch.get_rng_state() on the CPU.
inline constexpr size_t kGeneratorBytes = 5056;

// tokens [rows], each drawn from softmax(scores [rows, n]); `generator`, such a state, is left as torch would leave it.
void draw(const float* scores, int rows, int n, std::byte* generator, int64_t* tokens);

}  // namespace ktinject::decode
