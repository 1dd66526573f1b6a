/* No order, drawn from a seed: what a work request's turn is, and in which order the packets of a large write land. */
#pragma once
#include <stdint.h>

struct order {
  uint64_t state;
  uint64_t posted; /* work requests so far */
};

/* The same for the same seed, NIC and queue pair number. */
void order_start(struct order* order, uint64_t seed, const uint8_t* gid, uint32_t qpn);
uint64_t order_draw(struct order* order);
/* Its turn among all: up to window - 1 that are posted later may come before it. Smaller is earlier, and no two are equal. */
uint64_t order_turn(struct order* order, uint32_t window);
/* Turns below it cannot be drawn any more. */
uint64_t order_horizon(const struct order* order);

/* A permutation of 0..n-1, by its number. */
struct shuffle {
  uint64_t n, start, step;
};
struct shuffle shuffle(uint64_t n, uint64_t draw);
uint64_t shuffled(const struct shuffle* shuffle, uint64_t i);
