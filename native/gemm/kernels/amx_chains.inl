// Included by amx.cpp and amx_int4.cpp inside their target regions and namespaces: chains of tile products over panels,
// and what is done with their sums.

constexpr int kSlice = 16;
// Up to here, cutting k costs more, in accumulators stored and loaded, than it gains.
constexpr int kUncut = 32;

// Complete sums of up to 32 rows: `rescale` makes them results, in place, which the epilogue, if any, takes. A few rows
// at a time between tile products, which leave the vector units idle.
template <class Rescale>
class PendingEpilogue {
 public:
  PendingEpilogue(Rescale rescale, const Epilogue* epilogue) : rescale_(rescale), epilogue_(epilogue) {}

  // Where to store sums that belong at c and are complete at once: there, or if they only pass by, in the L1 cache, in
  // one of two places, as the other may not be empty yet.
  float* place(float* c) { return epilogue_ == nullptr ? c : places_[turn_++ & 1]; }
  // The sums [count, 32] at c are of panel `index`, rows `row` ...; there are `steps` tile products to hide them
  // behind.
  void start(const std::byte* panel, int index, int row, int count, float* c, int steps) {
    rest();
    panel_ = panel, index_ = index, row_ = row, left_ = count, c_ = c;
    step_ = (count + steps - 1) / steps;
    if (step_ < kAtOnce) step_ = kAtOnce;
    const int turns = (count + step_ - 1) / step_;
    period_ = waits_ = steps > turns ? steps / turns : 1;
  }
  void some() {
    if (left_ == 0 || --waits_ > 0) return;
    waits_ = period_;
    take(left_ < step_ ? left_ : step_);
  }
  void rest() {
    if (left_ > 0) take(left_);
  }

 private:
  // One row alone would be a long chain of operations with nothing beside it.
  static constexpr int kAtOnce = 4;

  void take(int count) {
    rescale_(panel_, row_, count, c_);
    if (epilogue_ != nullptr) epilogue_->take(epilogue_->context, index_, row_, count, c_);
    row_ += count, left_ -= count, c_ += count * kPanel;
  }

  const Rescale rescale_;
  const Epilogue* const epilogue_;
  alignas(64) float places_[2][2 * kTile * kPanel];
  int turn_ = 0;
  const std::byte* panel_ = nullptr;
  int index_ = 0, row_ = 0, left_ = 0, step_ = 0, period_ = 0, waits_ = 0;
  float* c_ = nullptr;
};

constexpr int kPair = 2 * kTile;

// A slice of panel `index`: blocks `first` ... of `all`, as B tiles at w.
struct Slice {
  const std::byte* panel;
  int index;
  const std::byte* w;
  int first, blocks, all;
};

template <class Tiles, Product product>
void multiply_all(bool two) {
  Tiles::template multiply_one<product, 0>();
  Tiles::template multiply_one<product, 1>();
  if (!two) return;
  Tiles::template multiply_one<product, 2>();
  Tiles::template multiply_one<product, 3>();
}

// A block: its products; beside(), what is to be hidden behind them; and the loads of the next block. A core has few
// tiles to rename these to, and fewer where another thread shares it: with four loads first and then four products, the
// tile unit waits for the ones and the load ports for the others. `early`: one load stands among the products; with
// two, beside() finds the queues full.
template <class Tiles, Product product, class Beside>
void multiply_block(const std::byte* next_a0, const std::byte* next_a1, const std::byte* next_b, bool is_last, bool two,
                    bool early, Beside beside) {
  Tiles::template multiply_one<product, 0>();
  Tiles::template multiply_one<product, 1>();
  if (early && !is_last) Tiles::load_a0(next_a0);
  if (two) Tiles::template multiply_one<product, 2>();
  if (two) Tiles::template multiply_one<product, 3>();
  beside();
  if (is_last) return;
  if (!early) Tiles::load_a0(next_a0);
  Tiles::load_b(next_b, next_b + 1024);
  if (two) Tiles::load_a1(next_a1);
}

// Rows of the two A tiles, as configured.
struct Heights {
  int m0 = 0, m1 = 0;

  template <class Tiles>
  void configure(int h0, int h1) {
    if (h0 == m0 && h1 == m1) return;
    Tiles::configure(TileShapes(h0, h1));
    m0 = h0, m1 = h1;
  }
};

// All rows times a slice, added to the sums of its panel, c [m, 32]. `early`, beside(): see multiply_block.
template <class Tiles, Product product, class Pending, class Beside>
void multiply_slice(const Slice& slice, const PackedActivations& rows, float* c, Heights& heights, Pending& pending,
                    bool early, Beside beside) {
  const auto first = static_cast<size_t>(slice.first);
  bool is_loaded = false;
  for (int row = 0; row < rows.m; row += kPair) {
    const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
    heights.configure<Tiles>(h0, h1);
    const bool two = h1 > 0;
    const size_t block0 = static_cast<size_t>(h0) * 64, block1 = static_cast<size_t>(h1) * 64;
    const std::byte *a0 = rows.group(row) + first * block0, *a1 = rows.group(row + kTile) + first * block1;
    const std::byte* b = slice.w;
    if (!is_loaded) {
      Tiles::load_a0(a0);
      Tiles::load_b(b, b + 1024);
      if (two) Tiles::load_a1(a1);
    }
    float* sums = c + static_cast<size_t>(row) * kPanel;
    // The sums that are loaded next, which may have left the L1 cache.
    const auto* next_sums = reinterpret_cast<const char*>(sums + (h0 + h1) * kPanel);
    if (first == 0) Tiles::zero(two);
    else Tiles::load_c(sums, two);
    // A pair of as many rows follows: its first block is loaded beside the last products of this one.
    is_loaded = row + 2 * kPair <= rows.m;
    for (int block = 1; block <= slice.blocks; ++block) {
      const bool is_last = block == slice.blocks;
      a0 += block0, a1 += block1, b += 2048;
      if (is_last) {
        a0 = rows.group(row + kPair) + first * block0, a1 = rows.group(row + kPair + kTile) + first * block1;
        b = slice.w;
      }
      multiply_block<Tiles, product>(a0, a1, b, is_last && !is_loaded, two, early, [&] {
        if (first > 0)
          for (int line = 0; line < 4; ++line, next_sums += 64) _mm_prefetch(next_sums, _MM_HINT_T0);
        beside();
        pending.some();
      });
    }
    if (slice.blocks == slice.all) sums = pending.place(sums);
    Tiles::store(sums, two);
    if (slice.first + slice.blocks == slice.all)
      pending.start(slice.panel, slice.index, row, h0 + h1, sums, slice.blocks);
  }
}

// What comes next from memory, asked for a little at a time: a burst of prefetches would fill the queue of outstanding
// lines, and the loads of the present panel would wait behind it.
class Ahead {
 public:
  Ahead(const Matrix& matrix, int m) {
    const size_t lines = 2 * matrix.tile_bytes() / 64, pairs = static_cast<size_t>((m + kPair - 1) / kPair);
    bytes_ = (lines + pairs - 1) / pairs * 64;
  }
  void start(const std::byte* next) { next_ = next; }
  void some() {
    for (const std::byte* end = next_ + bytes_; next_ < end; next_ += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
  }

 private:
  size_t bytes_;  // of a block
  const std::byte* next_ = nullptr;
};

// c [count, m, 32], fp32 or int32 as the product accumulates. weights(panel, first, blocks) returns `blocks` blocks of
// B tiles from block `first` on; rescale: see PendingEpilogue.
template <class Tiles, Product product, class Weights, class Rescale>
void chains(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
            const Epilogue* epilogue, int slice, Weights weights, Rescale rescale) {
  PendingEpilogue<Rescale> pending(rescale, epilogue);
  const int all = matrix.blocks();
  const size_t data_block = 2 * matrix.tile_bytes(), sums = static_cast<size_t>(rows.m) * kPanel;
  Heights heights;
  Ahead ahead(matrix, rows.m);
  for (int first = 0; first < all; first += slice) {
    const int blocks = all - first < slice ? all - first : slice;
    for (int p = 0; p < count; ++p) {
      const std::byte* panel = panels + static_cast<size_t>(p) * matrix.panel_bytes();
      ahead.start((p + 1 < count ? panel + matrix.panel_bytes() + static_cast<size_t>(first) * data_block
                                 : panels + static_cast<size_t>(first + slice) * data_block) +
                  matrix.head_bytes());
      multiply_slice<Tiles, product>({panel, p, weights(panel, first, blocks), first, blocks, all}, rows,
                                     c + static_cast<size_t>(p) * sums, heights, pending, rows.m > kPair,
                                     [&] { ahead.some(); });
    }
  }
  pending.rest();
  Tiles::release();
}

// c [count, 32] = (sum - offset) * column scale * row scale, in place.
void scale_sums(const float* column_scale, const int32_t* offset, const float* row_scale, int count, float* c) {
  for (int t = 0; t < 2; ++t) {
    const __m512 column = _mm512_loadu_ps(column_scale + t * kTile);
    const __m512i less = offset != nullptr ? _mm512_loadu_si512(offset + t * kTile) : _mm512_setzero_si512();
    for (int row = 0; row < count; ++row) {
      float* target = c + row * kPanel + t * kTile;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(target), less));
      _mm512_store_ps(target, _mm512_mul_ps(sum, _mm512_mul_ps(column, _mm512_set1_ps(row_scale[row]))));
    }
  }
}
