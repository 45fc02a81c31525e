// Matrix products: of a warp at once, of a warpgroup some time between their issue and the wait that covers them.
#include <algorithm>

#include "machine.h"

namespace emu {

namespace {

constexpr u32 UNREADABLE = 0x7FFFDEAD;  // a NaN: what accumulators hold while products are under way

// Row g or g + 8 of a left operand, columns 2t and 2t + 1 of k's half: register 2 * half + (row >= 8).
float left_element(u32 const* a, int row, int k) {
  const u32 both = a[k / 8 * 2 + row / 8];
  return wide(k % 2 ? both >> 16 : both & 0xFFFF);
}

// Where 8 of 16 columns of a row lie, of an operand in shared memory.
u32 place_of(u64 descriptor, int row, int half, const Block* block) {
  const u32 start = (descriptor & 0x3FFF) << 4, pitch = (descriptor >> 32 & 0x3FFF) << 4;
  u32 at = start + row / 8 * pitch + row % 8 * 128 + half * 16;
  at ^= (at >> 7 & 7) << 4;
  const u32 end = block->grid->dynamic_at + block->grid->shared_bytes;
  if (at < STATIC_END || at + 16 > end) fail("wgmma reads beyond the shared memory of " + name_of(block));
  return at;
}

// A left operand in shared memory may have rows that nobody has written, whose sums nobody uses: NaN.
float left_in_shared(u64 descriptor, int row, int k, const Block* block) {
  const u32 at = place_of(descriptor, row, k / 8, block) + k % 8 * 2;
  unsigned short bits;
  std::memcpy(&bits, block->shared + at, 2);
  return wide(block->state[at / 2] == 1 ? bits : POISON);
}

void run_product(Warp* warp, Product& product) {
  if (product.done) return;
  product.done = true;
  Block* block = warp->of;
  float left[16][16];  // [k][row]
  for (int k = 0; k < 16; k++) {
    for (int row = 0; row < 16; row++) {
      left[k][row] = product.left ? left_in_shared(product.left, warp->index % 4 * 16 + row, k, block)
                                  : left_element(product.a[row % 8 * 4 + k % 8 / 2], row, k);
    }
  }
  for (int n = 0; n < product.columns; n++) {
    float right[16];
    for (int half = 0; half < 2; half++) {
      const u32 at = place_of(product.descriptor, n, half, block);
      unsigned short bits[8];
      std::memcpy(bits, block->shared + at, 16);
      for (int i = 0; i < 8; i++) {
        const int state = block->state[at / 2 + i];
        if (state != 1) fail(std::string("wgmma reads shared memory that ") + (state ? "is not fenced, of " : "nobody has written, of ") + name_of(block));
        right[half * 8 + i] = wide(bits[i]);
      }
    }
    float* sum = product.sums->value[n];
    for (int k = 0; k < 16; k++) {
      for (int row = 0; row < 16; row++) sum[row] += left[k][row] * right[k];
    }
  }
}

int place_in(int lane, int i, int& row) {
  row = lane / 4 + i % 4 / 2 * 8;
  return i / 4 * 8 + lane % 4 * 2 + i % 2;
}

void take_registers(Sums& sums, float* registers, int columns) {
  const int lane = me()->lane;
  sums.registers[lane] = registers;
  for (int i = 0, row; i < columns / 2; i++) {
    const int n = place_in(lane, i, row);
    sums.value[n][row] = registers[i];
    std::memcpy(registers + i, &UNREADABLE, 4);
  }
}

void give_registers(Sums& sums, int columns) {
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0, row; i < columns / 2; i++) {
      const int n = place_in(lane, i, row);
      if (as_bits(sums.registers[lane][i]) != UNREADABLE) fail("accumulators were written while products were under way");
      sums.registers[lane][i] = sums.value[n][row];
    }
  }
}

Product& product_of_lane(u64 left, u64 descriptor, int columns, float* registers) {
  Warp* warp = me()->warp;
  const u32 number = me()->products++, at = number - warp->retired;
  if (at < warp->products.size()) {
    Product& product = warp->products[at];
    const bool same = product.left == left && product.descriptor == descriptor && product.columns == columns;
    if (!same) fail("lanes of a warp disagree on a wgmma");
    return product;
  }
  Product product{descriptor, left, columns, 0, me()->groups, false, {}, nullptr};
  for (Product& other : warp->products) {
    if (other.sums->registers[me()->lane] == registers) product.sums = other.sums;
  }
  if (!product.sums) product.sums = new Sums();
  product.sums->under_way++;
  // All four warps of the group issue the same.
  auto& same = warp->of->descriptors[warp->index / 4];
  const u64 both = left << 32 ^ descriptor;  // addresses are in the low half
  if (number == same.size()) same.push_back(both);
  if (same[number] != both) fail("warps of a warpgroup disagree on a wgmma");
  warp->products.push_back(product);
  return warp->products.back();
}

}  // namespace

// a: registers, or null for an operand in shared memory that `left` describes.
void multiply_group(float* d, const u32* a, u64 left, u64 descriptor, int columns) {
  Fiber* fiber = me();
  Warp* warp = fiber->warp;
  if (!fiber->fenced) fail("wgmma without wgmma.fence after the wait before");
  const u32 number = fiber->products;
  Product& product = product_of_lane(left, descriptor, columns, d);
  if (product.group != fiber->groups) fail("lanes of a warp disagree on the group of a wgmma");
  Sums& sums = *product.sums;
  if (!sums.registers[fiber->lane]) take_registers(sums, d, columns);
  if (sums.registers[fiber->lane] != d) fail("lanes of a warp disagree on the accumulators of a wgmma");
  product.a[fiber->lane] = a;
  if (++product.issued < 32) return;
  if (random_below(3) == 0) {
    for (u32 i = 0; i <= number - warp->retired; i++) run_product(warp, warp->products[i]);
  }
}

void group_fence() { me()->fenced = true; }

void group_commit() { me()->groups++, me()->fenced = false; }

void group_wait(int left) {
  meet("wgmma.wait_group", [left] {
    Warp* warp = me()->warp;
    for (Fiber* lane : warp->lanes) {
      if (lane->products != me()->products || lane->groups != me()->groups) fail("lanes of a warp issued different wgmmas");
    }
    while (!warp->products.empty() && warp->products.front().group + left < me()->groups) {
      Product& product = warp->products.front();
      run_product(warp, product);
      if (--product.sums->under_way == 0) {
        give_registers(*product.sums, product.columns);
        delete product.sums;
      }
      warp->products.pop_front(), warp->retired++;
    }
  });
}

// Matrix j of the four has its row r at the address of lane 8 j + r; a lane gets rows 2t and 2t + 1 of a column.
void load_turned(u32* const (&to)[4], u32 at) {
  may_yield();
  Fiber* fiber = me();
  std::copy_n(to, 4, fiber->to), fiber->row = at;
  meet("ldmatrix", [] {
    Fiber** lanes = me()->warp->lanes;
    for (int i = 0; i < 32; i++) {
      const auto [block, place] = find_shared(lanes[i]->row, 16, "ldmatrix");
      unsigned short row[8];
      std::memcpy(row, block->shared + place, 16);
      for (int column = 0; column < 8; column++) {
        if (!block->state[place / 2 + column]) fail("ldmatrix of shared memory that nobody has written");
        u32* out = lanes[column * 4 + i % 8 / 2]->to[i / 8];
        *out = i % 2 ? (*out & 0xFFFF) | (u32)row[column] << 16 : row[column];
      }
    }
  });
}

void multiply_warp(float* const (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  Fiber* fiber = me();
  std::copy_n(c, 4, fiber->c), std::copy_n(a, 4, fiber->a), std::copy_n(b, 2, fiber->b);
  meet("mma.sync", [] {
    Fiber** lanes = me()->warp->lanes;
    float left[16][16], right[16][8];
    for (int row = 0; row < 16; row++) {
      for (int k = 0; k < 16; k++) left[row][k] = left_element(lanes[row % 8 * 4 + k % 8 / 2]->a, row, k);
    }
    for (int k = 0; k < 16; k++) {
      for (int n = 0; n < 8; n++) {
        const u32 both = lanes[n * 4 + k % 8 / 2]->b[k / 8];
        right[k][n] = wide(k % 2 ? both >> 16 : both & 0xFFFF);
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
        float sum = *lanes[lane]->c[i];
        for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][n];
        *lanes[lane]->c[i] = sum;
      }
    }
  });
}

}  // namespace emu
