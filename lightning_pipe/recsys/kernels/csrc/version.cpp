// Version that the Python side compares with its own, so that a library of another version is not called.

#include <cstdint>

extern "C" __attribute__((visibility("default"))) int64_t lp_version() { return 4; }
