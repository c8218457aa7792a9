#include "cuda/launch_shapes.hpp"

#include <algorithm>

namespace ktinject::cuda {

LinearShape linear_shape(int outputs, const Limits& limits) {
  constexpr int kMuch = LinearShape::kMuch, kLittle = LinearShape::kLittle;
  LinearShape shape;
  shape.held =
      LinearShape::shared_bytes(LinearShape::most_tiles(kMuch), kMuch) <= limits.block_shared_bytes ? kMuch : kLittle;
  // Less than there is, so that what others fetched stays there.
  shape.l2_bytes = std::min(int64_t{32} << 20, limits.l2_bytes * 2 / 3);
  const int tiles = (outputs + LinearShape::kTile - 1) / LinearShape::kTile, room = limits.multiprocessors;
  // One group of tiles a block where that has all; else the block with most tiles decides. Groups of few tiles are
  // slower.
  const int each = (tiles + room - 1) / room, most = LinearShape::most_tiles(shape.held);
  auto longest = [&](int size) {
    const int groups = (tiles + size - 1) / size;
    return (groups + room - 1) / room * size;
  };
  shape.tiles = std::min(each, most);
  for (const int size : {6, 5, 4, 3})
    if (each > most && size < most && longest(size) < longest(shape.tiles)) shape.tiles = size;
  if (shape.tiles == 7) shape.tiles = 8;
  shape.blocks = std::min(room, (tiles + shape.tiles - 1) / shape.tiles);
  return shape;
}

}  // namespace ktinject::cuda
