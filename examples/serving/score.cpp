// Scores of an AOTInductor package, in a process without Python.
//
//     score MODEL.pt2 INPUTS.pt [LIBRARY ...]
//
// INPUTS.pt is a list of tensors in the order of MODEL.pt2.inputs.json, saved by torch.save. Prints one score per line.
// LIBRARY is a shared library of operators that the model calls, such as fbgemm_gpu_py.so of the package fbgemm_gpu.
// docs/serving.md has the command that compiles this file.

#include <dlfcn.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

std::vector<at::Tensor> read_inputs(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("expected a file of tensors, found none at " + path);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& one : torch::jit::pickle_load(bytes).toList()) inputs.push_back(one.toTensor());
  return inputs;
}

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "expected MODEL.pt2 INPUTS.pt [LIBRARY ...], got %d arguments\n", count - 1);
    return 2;
  }
  try {
    // Loading a library registers its operators. The package looks them up when it is loaded.
    for (int place = 3; place < count; ++place) {
      if (!dlopen(arguments[place], RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(dlerror());
    }
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    const at::Tensor scores = model.run(read_inputs(arguments[2])).at(0).to(at::kDouble).contiguous();
    for (int64_t row = 0; row < scores.numel(); ++row) std::printf("%.9g\n", scores.data_ptr<double>()[row]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
