// Which keys a query sees. All masks are intervals of keys that move with the query, so one rule
// does for causal, windowed and full attention: the same as k_bounds in cuflash/problem.py.
#pragma once
#include "params.cuh"

struct Bounds {
  int lo, hi;  // keys [lo, hi); none where hi <= lo
};

// The queries that see key k follow by symmetry: k_bounds(k, sq, 1 - hi_shift, 1 - lo_shift).
DEVICE Bounds k_bounds(int q, int sk, int lo_shift, int hi_shift) {
  const int lo = q + lo_shift;
  const int hi = q + hi_shift;
  return {lo > 0 ? lo : 0, hi < sk ? hi : sk};
}
