"""From one row of logits to one token: the order of operations, bit for bit.

`reference.py` is this text as numpy; `csrc/kernels/sampling.inl` gives the same bits without sorting the vocabulary.
All values are float32 and masses float64; every operation is a correctly rounded add, subtract, multiply, divide or
compare, in the order written here. No fma.

0. The raw row. x[V]. If asked, its 64-bit hash: the sum over i, modulo 2^64, of m(i * 2^32 + bits(x_i)) where
   m(v) multiplies by 0x9E3779B97F4A7C15, xors the high half onto the low, and multiplies by 0xBF58476D1CE4E5B9.
   If any logit is NaN or infinite, the row's id is -1 and the rest is skipped: that request fails, its neighbours do
   not.
1. Log-probabilities, if asked, come from the raw row, whatever the steps below do to it:
   log p_i = (x_i - max) - log(float32(mass)), mass = sum of w_i as in step 5 with T = 1.
   The best are listed by logit descending, then id ascending.
2. Penalties, once for each distinct id of prompt and output: repetition r (x / r where x > 0, else x * r); then, for
   an id that the output holds n > 0 times, x - frequency * n and then x - presence.
3. Bias: x + bias. Minus infinity makes an id impossible (a caller's own biases cannot: they end at -100).
   After 2 and after 3 a logit that overflowed upwards is the largest float32.
   If no id is possible, the bias was absurd: the id is the greedy one of the raw row.
4. Temperature below 1e-5: greedy. The highest logit, the lowest id among equals.
5. Otherwise every id gets a weight. z_i = (x_i - max) * (1 / T); e_i = exp_f32(z_i);
   w_i = (e_i + 2^-11) - 2^-11, which is e_i rounded to a multiple of 2^-34.
   The heaviest id weighs 1, so sums of up to 2^19 weights are whole multiples of 2^-34 below 2^53 of them: every mass
   below is exact in float64, in whatever order it is added. An id lighter than 2^-35 cannot be chosen.
6. The order: logit descending, then id ascending. Weights never rise along it, because exp_f32 never falls.
   c_j is the mass of the first j ids. Each filter keeps the first k ids, k = V to begin with:
   min_p: k = number of ids with w_i >= min(min_p, 1); top_k: k = min(k, top_k);
   top_p: the smallest k with c_k >= top_p * (c_k before).
7. u in [0, 1) has 53 bits, from Philox4x32-10 with the seed as key and (position of the new token, choice, 0, 0) as
   counter. The token is the first of the order with c_j > u * c_k. (There is always one, at or before k.)

No step looks at another row, and the sampler keeps nothing between calls: a token depends on its request alone.
"""
