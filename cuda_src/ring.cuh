// Buffers that are filled and used in turns.
#pragma once
#include "hopper.cuh"

// A buffer, and how often, mod 2, all have been used before.
template <int kStages>
struct Turn {
  unsigned stage = 0, round = 0;
  DEVICE Turn later(int turns) const {  // at most kStages
    const bool around = stage + turns >= kStages;
    return {around ? stage + turns - kStages : stage + turns, round ^ around};
  }
  DEVICE void next() {
    if (++stage < kStages) return;
    stage = 0, round ^= 1;
  }
};

// A warp is done with a buffer, or has filled it. `loaded`: lanes have read it themselves, and may
// not have what they read yet. Without the fence the arrival overtakes their loads, and so did
// copies: the last factors loaded were those of the next block.
DEVICE void release(unsigned barrier, bool loaded = false) {
  if (loaded) {
    fence_async();
    __syncwarp();
  }
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
