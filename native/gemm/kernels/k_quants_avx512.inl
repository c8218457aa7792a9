// How vectors of 64 bytes read a block of a K-quant: codes of four inputs, and s and t of two runs, of 16 outputs.
//
// Included after k_quants.inl, inside a target region and an unnamed namespace.

inline __m512i load(const std::byte* p) { return _mm512_load_si512(p); }
inline __m256i load_half(const std::byte* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

// Each byte's bit `from` brought to bit `to`, with others beside it.
template <int from, int to>
inline __m512i moved(__m512i v) {
  if constexpr (from > to) return _mm512_srli_epi16(v, from - to);
  else if constexpr (from < to) return _mm512_slli_epi16(v, to - from);
  else return v;
}
// The lowest `bits` bits of each byte.
template <int bits>
inline __m512i lowest() {
  return _mm512_set1_epi8(static_cast<char>((1 << bits) - 1));
}

// Codes of quad `kQuad` of 32 inputs, for 16 outputs; of iq4_xs their values, and kIq4Offset.
template <Format kFormat, int kQuad>
inline __m512i codes_of(const std::byte* rows) {
  constexpr KQuant kKind = k_quant(kFormat);
  constexpr int kLowQuads = 8 / kKind.low;
  __m512i code = moved<kQuad % kLowQuads * kKind.low, 0>(load(rows + kQuad / kLowQuads * 64));
  if constexpr (kKind.high > 0) {
    constexpr int kHighQuads = 8 / kKind.high;
    const __m512i high =
        moved<kQuad % kHighQuads * kKind.high, kKind.low>(load(rows + (kKind.low + kQuad / kHighQuads) * 64));
    code = _mm512_ternarylogic_epi32(code, high, lowest<kKind.low>(), 0xe4);  // of `code` the lowest bits
  }
  code = _mm512_and_si512(code, lowest<kKind.low + kKind.high>());
  if constexpr (kFormat == Format::iq4_xs) {
    const __m128i values = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values)),
                                        _mm_set1_epi8(static_cast<char>(kIq4Offset)));
    code = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), code);
  }
  return code;
}

// In each 32-bit lane, s of two runs.
template <Format kFormat>
inline __m512i scales(const KTile<kFormat>& tile, int pair) {
  const __m256i bytes = load_half(tile.s(pair));
  if constexpr (kFormat == Format::q2_k) return _mm512_and_si512(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(15));
  else return _mm512_cvtepi8_epi16(bytes);
}
// The same of t.
template <Format kFormat>
inline __m512i minima(const KTile<kFormat>& tile, int pair) {
  const __m512i bytes = _mm512_cvtepu8_epi16(load_half(tile.t(pair)));
  return kFormat == Format::q2_k ? _mm512_srli_epi16(bytes, 4) : bytes;
}
