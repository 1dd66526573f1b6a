#include "order.h"
#include <string.h>

/* splitmix64: one word of state, and any two seeds differ at once. */
static uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t order_draw(struct order* order) { return mix(order->state += 0x9e3779b97f4a7c15u); }

void order_start(struct order* order, uint64_t seed, const uint8_t* gid, uint32_t qpn) {
  uint64_t high, low;
  memcpy(&high, gid, 8);
  memcpy(&low, gid + 8, 8);
  order->state = mix(mix(mix(seed + 1) ^ high) ^ low) + qpn;
  order->posted = 0;
}

uint64_t order_turn(struct order* order, uint32_t window) {
  uint64_t draw = order_draw(order);
  uint64_t place = order->posted++ + (window > 1 ? draw % window : 0);
  return place << 32 | (window > 1 ? draw >> 32 : 0);
}

uint64_t order_horizon(const struct order* order) { return order->posted << 32; }

static uint64_t common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

struct shuffle shuffle(uint64_t n, uint64_t draw) {
  struct shuffle s = {.n = n, .start = 0, .step = 1};
  if (n < 2) return s;
  s.start = (uint32_t)draw % n;
  s.step = 1 + (draw >> 32) % (n - 1);
  while (common_divisor(s.step, n) != 1) s.step++;
  return s;
}

uint64_t shuffled(const struct shuffle* s, uint64_t i) { return (s->start + i * s->step) % s->n; }
