// Reads the symbol table of the file that this code lies in, the program or a shared library (ELF, not stripped);
// neither dladdr() nor the C++ library know of functions and variables in unnamed namespaces.
#include "simt/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "simt/block.h"

namespace simt {
namespace {

// The loaded file that holds this very code.
struct Module {
  size_t load_address = 0;
  std::string file = "/proc/self/exe";
  unsigned char* thread_storage = nullptr;  // the calling thread's copy
  size_t thread_storage_bytes = 0;
};

int take_if_own(dl_phdr_info* loaded, size_t, void* result) {
  const size_t here = size_t(&take_if_own) - loaded->dlpi_addr;
  Module found;
  bool own = false;
  for (int i = 0; i < loaded->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = loaded->dlpi_phdr[i];
    own |= part.p_type == PT_LOAD && here - part.p_vaddr < part.p_memsz;
    if (part.p_type == PT_TLS) {
      found.thread_storage = static_cast<unsigned char*>(loaded->dlpi_tls_data);
      found.thread_storage_bytes = part.p_memsz;
    }
  }
  if (!own) return 0;
  found.load_address = loaded->dlpi_addr;
  if (*loaded->dlpi_name) found.file = loaded->dlpi_name;  // the program itself has no name
  *static_cast<Module*>(result) = found;
  return 1;
}

Module own_module() {
  Module module;
  dl_iterate_phdr(take_if_own, &module);
  return module;
}

struct Symbol {
  size_t begin, end;  // of a function: from the program's load address
  std::string mangled;
  int file;  // counts the translation units, 0 for symbols seen outside their own
};

struct SymbolTable {
  std::vector<Symbol> functions;
  std::vector<Symbol> thread_locals;
};

void read_symbols(const unsigned char* elf, SymbolTable& table) {
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(elf);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(elf + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* names = reinterpret_cast<const char*>(elf + sections[sections[i].sh_link].sh_offset);
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(elf + sections[i].sh_offset);
    int file = 0;
    for (size_t k = 0; k < sections[i].sh_size / sizeof(ElfW(Sym)); ++k) {
      const ElfW(Sym)& symbol = symbols[k];
      const int type = ELF64_ST_TYPE(symbol.st_info);
      if (type == STT_FILE) ++file;  // the local symbols of one translation unit follow
      if ((type != STT_FUNC && type != STT_TLS) || symbol.st_size == 0 || symbol.st_shndx == SHN_UNDEF) continue;
      const int of_file = ELF64_ST_BIND(symbol.st_info) == STB_LOCAL ? file : 0;
      auto& list = type == STT_FUNC ? table.functions : table.thread_locals;
      list.push_back({symbol.st_value, symbol.st_value + symbol.st_size, names + symbol.st_name, of_file});
    }
  }
}

const SymbolTable& symbol_table() {
  static const SymbolTable table = [] {
    SymbolTable table;
    const int file = open(own_module().file.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0) {
      const size_t bytes = size_t(status.st_size);
      void* elf = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
      if (elf != MAP_FAILED) {
        read_symbols(static_cast<const unsigned char*>(elf), table);
        munmap(elf, bytes);
      }
    }
    if (file >= 0) close(file);
    const auto by_begin = [](const Symbol& a, const Symbol& b) { return a.begin < b.begin; };
    std::sort(table.functions.begin(), table.functions.end(), by_begin);
    std::sort(table.thread_locals.begin(), table.thread_locals.end(), by_begin);
    return table;
  }();
  return table;
}

const Symbol* symbol_at(const std::vector<Symbol>& symbols, size_t place) {
  auto next = std::upper_bound(symbols.begin(), symbols.end(), place,
                               [](size_t place, const Symbol& symbol) { return place < symbol.begin; });
  if (next == symbols.begin()) return nullptr;
  --next;
  return place < next->end ? &*next : nullptr;
}

std::string demangle(const std::string& mangled) {
  char* plain = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, nullptr);
  std::string name = plain ? plain : mangled;
  std::free(plain);
  return name;
}

// "void flash::cpu::(anonymous namespace)::scores<64>(float const*)" becomes "scores<64>".
std::string without_scope(std::string name) {
  const std::string unnamed = "(anonymous namespace)::";
  for (size_t at; (at = name.find(unnamed)) != std::string::npos;) name.erase(at, unnamed.size());
  size_t begin = 0, end = name.size();
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (depth != 0) continue;
    if (name[i] == ' ' || name[i] == ':') begin = i + 1;
    if (name[i] == '(') {
      end = i;
      break;
    }
  }
  return name.substr(begin, end - begin);
}

// All shared variables of the program, by place.
const std::vector<SharedVariable>& all_shared_variables() {
  static const std::vector<SharedVariable> all = [] {
    std::vector<SharedVariable> all;
    for (const Symbol& symbol : symbol_table().thread_locals) {
      // A local variable's mangled name holds that of its function: _ZZ <function> E <variable>.
      if (!symbol.mangled.starts_with("_ZZ")) continue;
      const std::string name = demangle(symbol.mangled);
      all.push_back(
          {symbol.begin, symbol.end, name.substr(name.rfind(':') + 1), "_Z" + symbol.mangled.substr(3), symbol.file});
    }
    return all;
  }();
  return all;
}

struct Kernel {
  std::string name;
  std::string mangled;
  int file;
  std::vector<SharedVariable> variables;
};

std::map<const void*, Kernel> kernels;  // that have been launched

bool stands_in(const SharedVariable& variable, const Kernel& kernel) {
  return variable.file == kernel.file && variable.function.starts_with(kernel.mangled + "E");
}

const Kernel& kernel_at(const void* address) {
  const auto [entry, is_new] = kernels.try_emplace(address);
  Kernel& kernel = entry->second;
  if (!is_new) return kernel;
  const Symbol* function = symbol_at(symbol_table().functions, size_t(address) - load_address());
  if (!function) {
    kernel.name = "kernel";
    return kernel;
  }
  kernel.name = without_scope(demangle(function->mangled));
  kernel.mangled = function->mangled;
  kernel.file = function->file;
  for (const SharedVariable& variable : all_shared_variables())
    if (stands_in(variable, kernel)) kernel.variables.push_back(variable);
  return kernel;
}

// "scores<64>" is an instance of "scores".
std::string template_name(const std::string& name) { return name.substr(0, name.find('<')); }

}  // namespace

size_t load_address() { return own_module().load_address; }
std::string program_file() { return own_module().file; }
bool has_symbols() { return !symbol_table().functions.empty(); }

const std::string& kernel_name(const void* kernel) { return kernel_at(kernel).name; }
const std::vector<SharedVariable>& shared_variables_of(const void* kernel) { return kernel_at(kernel).variables; }

const SharedVariable* shared_variable_at(size_t place) {
  const auto& all = all_shared_variables();
  auto next = std::upper_bound(all.begin(), all.end(), place,
                               [](size_t place, const SharedVariable& variable) { return place < variable.begin; });
  if (next == all.begin()) return nullptr;
  --next;
  return place < next->end ? &*next : nullptr;
}

bool is_other_variable(size_t place) {
  const Symbol* symbol = symbol_at(symbol_table().thread_locals, place);
  return symbol && !symbol->mangled.starts_with("_ZZ");
}

bool is_of_another_kernel(const SharedVariable& variable, const void* address) {
  const Kernel& kernel = kernel_at(address);
  if (stands_in(variable, kernel)) return false;
  for (const auto& [other_address, other] : kernels)
    if (stands_in(variable, other)) return true;
  // The demangled name of the variable would begin with that of its function.
  return variable.file == kernel.file &&
         template_name(without_scope(demangle("_ZZ" + variable.function.substr(2)))) == template_name(kernel.name);
}

ThreadStorage thread_storage() {
  // A library's storage is made when a thread first asks for a variable in it.
  [[maybe_unused]] BlockRunner* volatile one_of_them = runner;
  const Module module = own_module();
  return {module.thread_storage, module.thread_storage_bytes};
}

}  // namespace simt
