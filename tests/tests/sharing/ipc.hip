// Memory of one process in another one by a handle (hipIpcGetMemHandle), both with the whole runtime. The process that makes the
// memory prints what it sees, the one that opens it what that one sees; they take turns, so that the lines come in order.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <vector>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define HIP(call)                                                                                                    \
    do {                                                                                                             \
        hipError_t error_ = (call);                                                                                  \
        if (error_ != hipSuccess) {                                                                                  \
            printf("line %d: %s: %s\n", __LINE__, #call, hipGetErrorName(error_));                                   \
            _exit(3);                                                                                                \
        }                                                                                                            \
    } while (0)

static const size_t VIEW = 1 << 20, VIEWS = 4;
static int peer;

static void give(const void *bytes, size_t size)
{
    if (send(peer, bytes, size, MSG_NOSIGNAL) != ssize_t(size)) {
        printf("the other process has gone\n");
        _exit(4);
    }
}

static void take(void *bytes, size_t size)
{
    if (recv(peer, bytes, size, 0) != ssize_t(size)) {
        printf("the other process has gone\n");
        _exit(4);
    }
}

// The other one goes on until it is our turn again.
static void turn()
{
    char byte = 0;
    give(&byte, 1);
    take(&byte, 1);
}

struct Message {
    hipIpcMemHandle_t whole, inside, freed;
    size_t offset;
};

__global__ void add(unsigned *at, unsigned count, unsigned value)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        at[i] += value + i;
}

// What each view begins and ends with.
static void views(const char *who, const unsigned char *base)
{
    printf("%s: views", who);
    for (size_t view = 0; view < VIEWS; view++) {
        unsigned char first, last;
        HIP(hipMemcpy(&first, base + view * VIEW, 1, hipMemcpyDeviceToHost));
        HIP(hipMemcpy(&last, base + view * VIEW + VIEW - 1, 1, hipMemcpyDeviceToHost));
        printf(" %d..%d", first, last);
    }
    printf("\n");
}

// How many words of the last view are not what add() makes of its bytes.
static size_t wrong_sums(const unsigned char *base, unsigned value)
{
    std::vector<unsigned> found(VIEW / sizeof(unsigned));
    HIP(hipMemcpy(found.data(), base + 3 * VIEW, VIEW, hipMemcpyDeviceToHost));
    size_t wrong = 0;
    for (unsigned i = 0; i < found.size(); i++)
        wrong += found[i] != 0x03030303u + value + i;
    return wrong;
}

// Case C17: a handle of an address within an allocation. Case C22: a handle in the process that made it.
static void maker()
{
    Message message = {};
    unsigned char *base, *other;
    HIP(hipMalloc(reinterpret_cast<void **>(&base), VIEWS * VIEW));
    for (size_t view = 0; view < VIEWS; view++)
        HIP(hipMemset(base + view * VIEW, int(view), VIEW));
    HIP(hipMalloc(reinterpret_cast<void **>(&other), VIEW));
    HIP(hipMemset(other, 9, VIEW));
    HIP(hipDeviceSynchronize());
    unsigned char *inside = base + 2 * VIEW;
    HIP(hipIpcGetMemHandle(&message.whole, base));
    printf("maker: a handle of an address inside: %s\n", hipGetErrorName(hipIpcGetMemHandle(&message.inside, inside)));
    HIP(hipIpcGetMemHandle(&message.freed, other));
    hipDeviceptr_t start;
    size_t size;
    HIP(hipMemGetAddressRange(&start, &size, hipDeviceptr_t(inside)));
    message.offset = size_t(inside - static_cast<unsigned char *>(start));
    printf("maker: %zu of %zu bytes\n", message.offset, size);
    void *own = nullptr;
    hipError_t error = hipIpcOpenMemHandle(&own, message.whole, hipIpcMemLazyEnablePeerAccess);
    printf("maker: its own handle: %s\n", hipGetErrorName(error));
    void *nothing = nullptr;
    error = hipIpcGetMemHandle(&message.inside, nothing);
    printf("maker: a handle of nothing: %s\n", hipGetErrorName(error));
    error = hipIpcGetMemHandle(&message.inside, &message);
    printf("maker: a handle of the stack: %s\n", hipGetErrorName(error));
    HIP(hipIpcGetMemHandle(&message.inside, inside));
    give(&message, sizeof message);
    char byte;
    take(&byte, 1);
    views("maker", base);
    printf("maker: words that a kernel of the other process wrote wrong: %zu\n", wrong_sums(base, 1000));
    // The other process has it open.
    HIP(hipMemset(base + VIEW, 5, VIEW));
    HIP(hipDeviceSynchronize());
    HIP(hipFree(other));
    turn();
    views("maker, when the other process has closed it", base);
    HIP(hipMemset(base, 8, VIEWS * VIEW));
    HIP(hipFree(base));
    give(&byte, 1);
}

static void user()
{
    Message message;
    take(&message, sizeof message);
    void *opened = nullptr, *again = nullptr, *inside = nullptr;
    HIP(hipIpcOpenMemHandle(&opened, message.whole, hipIpcMemLazyEnablePeerAccess));
    unsigned char *base = static_cast<unsigned char *>(opened);
    views("user", base);
    unsigned char byte;
    HIP(hipMemcpy(&byte, base + message.offset, 1, hipMemcpyDeviceToHost));
    printf("user: at the offset that it was told: %d\n", byte);
    hipError_t error = hipIpcOpenMemHandle(&again, message.whole, hipIpcMemLazyEnablePeerAccess);
    printf("user: the same handle again: %s%s\n", hipGetErrorName(error),
           error != hipSuccess ? "" : again == opened ? ", the same address" : ", another address");
    hipError_t second = hipIpcOpenMemHandle(&inside, message.inside, hipIpcMemLazyEnablePeerAccess);
    printf("user: the handle of an address inside: %s\n", hipGetErrorName(second));
    if (second == hipSuccess) {
        HIP(hipMemcpy(&byte, inside, 1, hipMemcpyDeviceToHost));
        printf("user: what lies there: %d\n", byte);
        printf("user: close that: %s\n", hipGetErrorName(hipIpcCloseMemHandle(inside)));
    }
    if (error == hipSuccess)
        printf("user: close the second one: %s\n", hipGetErrorName(hipIpcCloseMemHandle(again)));
    views("user, with one left", base);
    unsigned count = unsigned(VIEW / sizeof(unsigned));
    hipLaunchKernelGGL(add, dim3(count / 256), dim3(256), 0, 0, reinterpret_cast<unsigned *>(base + 3 * VIEW), count, 1000u);
    HIP(hipGetLastError());
    HIP(hipMemset(base, 6, VIEW));
    HIP(hipDeviceSynchronize());
    turn();
    views("user", base);
    void *gone = nullptr;
    error = hipIpcOpenMemHandle(&gone, message.freed, hipIpcMemLazyEnablePeerAccess);
    printf("user: a handle of memory that was freed: %s\n", hipGetErrorName(error));
    (void)hipGetLastError();
    if (error == hipSuccess)
        printf("user: close that: %s\n", hipGetErrorName(hipIpcCloseMemHandle(gone)));
    printf("user: close: %s\n", hipGetErrorName(hipIpcCloseMemHandle(opened)));
    printf("user: close once more: %s\n", hipGetErrorName(hipIpcCloseMemHandle(opened)));
    (void)hipGetLastError();
    turn();
}

// With an argument: an event that other processes could wait for.
static int event()
{
    hipEvent_t made;
    hipIpcEventHandle_t handle;
    HIP(hipEventCreateWithFlags(&made, hipEventInterprocess | hipEventDisableTiming));
    printf("a handle of an event: %s\n", hipGetErrorName(hipIpcGetEventHandle(&handle, made)));
    return 0;
}

int main(int argc, char **)
{
    int sockets[2];
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (argc > 1)
        return event();
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
        return 5;
    // Before the runtime starts.
    pid_t child = fork();
    peer = sockets[child == 0];
    close(sockets[child != 0]);
    if (child == 0) {
        alarm(200);
        user();
        return 0;
    }
    maker();
    int status = -1;
    waitpid(child, &status, 0);
    HIP(hipDeviceSynchronize());
    printf("the other process ended with %d\n", status);
    return status != 0;
}
