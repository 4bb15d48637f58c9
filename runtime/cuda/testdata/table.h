/* The kernels that an emulator has, KERNELS of the file that includes this one, as driver.c calls them. */
#pragma once

namespace {

struct kernel {
  const char *name;
  u32 parameters;
  u32 bytes[8];
  void (*call)(void *const *parameters);
};

template <u32... i> struct indices {};
template <u32 n, u32... i> struct first : first<n - 1, n - 1, i...> {};
template <u32... i> struct first<0, i...> { typedef indices<i...> type; };

template <auto f> struct trampoline;
template <typename... A, void (*f)(A...)> struct trampoline<f> {
  template <u32... i> static void apply(void *const *p, indices<i...>) { f(*(A *)p[i]...); }
  static void call(void *const *p) { apply(p, typename first<sizeof...(A)>::type{}); }
  static constexpr kernel of(const char *name) { return kernel{name, sizeof...(A), {sizeof(A)...}, call}; }
};

const kernel kernels[] = {
#define K(name) trampoline<name>::of(#name)
  KERNELS
};

} // namespace

/* What driver.c calls: the number of a kernel, -1 if there is none; the bytes of
 * its parameters, one after the other; and its run. */
extern "C" int emulated_find(const char *name) {
  for (u32 i = 0; i < sizeof kernels / sizeof *kernels; i++)
    if (strcmp(kernels[i].name, name) == 0) return (int)i;
  return -1;
}
extern "C" unsigned emulated_parameter(int k, unsigned i) { return i < kernels[k].parameters ? kernels[k].bytes[i] : 0; }
extern "C" void emulated_run(int k, unsigned grid, unsigned size, void **parameters) {
  struct call { int k; void **parameters; } c = {k, parameters};
  body = [](void *p) { kernels[((call *)p)->k].call(((call *)p)->parameters); };
  body_argument = &c;
  thread_total = size, block_total = grid;
  for (block_now = 0; block_now < grid; block_now++) run_block();
}
