// Runs a build for CPUs with a matrix unit on one without: a CPU stops at each tile instruction (SIGILL), which is read
// here byte by byte, as the manual encodes it, and carried out in plain C++. To be preloaded (LD_PRELOAD).
#define RADIXRT_EMULATE_AMX
#include "amx.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>

using namespace radixrt::amx;

namespace {

std::atomic<int64_t> num_trapped{0}, num_configured{0};

// Number of a general register in an instruction -> its place in a signal's context.
constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

struct Operand {
    uint8_t mode, reg, rm;  // of the ModRM byte
    int64_t address = 0;    // without the index
    int64_t index = 0;
    const uint8_t* next;  // the byte after the operand
};

// Args: at: the ModRM byte. b, x: the bits that extend base and index.
Operand read_operand(const uint8_t* at, int b, int x, const greg_t* registers) {
    Operand operand{};
    operand.mode = *at >> 6, operand.reg = *at >> 3 & 7, operand.rm = *at & 7;
    ++at;
    int base = operand.rm | b << 3;
    bool has_base = true, is_relative = false;
    if (operand.mode != 3) {
        if (operand.rm == 4) {
            uint8_t sib = *at++;
            int index = (sib >> 3 & 7) | x << 3;
            base = (sib & 7) | b << 3;
            has_base = !((sib & 7) == 5 && operand.mode == 0);
            if (index != 4) operand.index = registers[kRegisters[index]] << (sib >> 6);
        } else if (operand.rm == 5 && operand.mode == 0) {
            has_base = false, is_relative = true;
        }
        if (has_base) operand.address = registers[kRegisters[base]];
        if (operand.mode == 1) operand.address += (int8_t)*at++;
        if (operand.mode == 2 || !has_base) {
            int32_t displacement;
            std::memcpy(&displacement, at, 4);
            operand.address += displacement;
            at += 4;
        }
        if (is_relative) operand.address += (int64_t)at;
    }
    operand.next = at;
    return operand;
}

// Carry out the instruction at `code`; gives the next one, or null if it is none of ours.
const uint8_t* carry_out(const uint8_t* code, const greg_t* registers) {
    // VEX, three bytes: C4 | ~R ~X ~B map(5) | W ~vvvv L pp(2)
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return nullptr;
    int x = !(code[1] & 0x40), b = !(code[1] & 0x20), prefix = code[2] & 3, v = ~code[2] >> 3 & 15;
    bool is_r_set = !(code[1] & 0x80);
    Operand operand = read_operand(code + 4, b, x, registers);
    auto rows = reinterpret_cast<char*>(operand.address);
    bool is_memory = operand.mode != 3, has_index = is_memory && operand.rm == 4;
    if (is_r_set || (v && code[3] != 0x5c)) return nullptr;
    switch (code[3] << 4 | prefix) {
        case 0x490:
            if (is_memory) {
                emulated::configure(*reinterpret_cast<const Config*>(rows + operand.index));
                ++num_configured;
            } else if (operand.reg == 0 && operand.rm == 0) {
                emulated::release();
            } else {
                return nullptr;
            }
            break;
        case 0x493:
            if (is_memory || operand.rm) return nullptr;
            emulated::zero(operand.reg);
            break;
        case 0x4b3:
            if (!has_index) return nullptr;
            emulated::load(operand.reg, rows, operand.index);
            break;
        case 0x4b2:
            if (!has_index) return nullptr;
            emulated::store(operand.reg, rows, operand.index);
            break;
        case 0x5c2:
            if (is_memory || b || v >= kTiles) return nullptr;
            emulated::multiply_add(operand.reg, operand.rm, v);
            break;
        default:
            return nullptr;
    }
    return operand.next;
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const uint8_t* next = carry_out(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
    if (!next) {
        signal(SIGILL, SIG_DFL);  // it comes again, and ends the program
        return;
    }
    registers[REG_RIP] = (greg_t)next;
    ++num_trapped;
}

__attribute__((constructor)) void install() {
    struct sigaction action {};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace

extern "C" {

int64_t trapped_instructions() { return num_trapped; }
int64_t loaded_configurations() { return num_configured; }
int32_t is_configured() { return emulated::unit.is_configured; }  // the calling thread's

// In place of the library's, which asks the CPU.
int32_t rt_has_tiles() { return !std::getenv("TRAP_WITHOUT_TILES"); }

// In place of libc's: the one request for tiles is granted.
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long), d = va_arg(list, long),
         e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a == 0x1023 && b == 18) return 0;
    static auto original = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
    return original(number, a, b, c, d, e, f);
}

}  // extern "C"
