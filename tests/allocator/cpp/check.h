// CHECK for test programs: if the expression is false, it prints the expression and its location, and exits.
#pragma once
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);       \
      std::exit(1);                                                              \
    }                                                                            \
  } while (false)
