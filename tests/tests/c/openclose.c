// Open and close (case C38): states, many rounds, many threads; nothing is left behind.
#include "kmt.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/wait.h>

static long fds(void) {
    long count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

static long status_field(const char *name) {
    char line[256];
    long value = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name)))
            value = atol(line + strlen(name) + 1);
    if (file)
        fclose(file);
    return value;
}

// A child of fork closes as often as its parent has opened, though nothing else of that is its own.
static void closes_in_a_child(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        HsaVersionInfo version;
        say("version in a child", hsaKmtGetVersion(&version));
        for (int number = 1; number <= 3; number++) {
            say("close in a child", hsaKmtCloseKFD());
            pid_t grandchild = number == 1 ? fork() : -1;
            if (grandchild == 0) {
                say("close in a child of the child", hsaKmtCloseKFD());
                say("close in a child of the child", hsaKmtCloseKFD());
                _exit(0);
            }
            if (number == 1)
                waitpid(grandchild, NULL, 0);
        }
        _exit(0);
    }
    int status;
    if (waitpid(child, &status, 0) != child || status)
        printf("status of the child: %#x\n", status);
}

static void *rounds(void *failed) {
    for (int round = 0; round < 20; round++) {
        HSAKMT_STATUS opened = hsaKmtOpenKFD();
        HsaVersionInfo version;
        if (opened != HSAKMT_STATUS_SUCCESS && opened != HSAKMT_STATUS_KERNEL_ALREADY_OPENED)
            ++*(int *)failed;
        if (hsaKmtGetVersion(&version) != HSAKMT_STATUS_SUCCESS)
            ++*(int *)failed;
        if (hsaKmtCloseKFD() != HSAKMT_STATUS_SUCCESS)
            ++*(int *)failed;
    }
    return NULL;
}

int main(int count, char **arguments) {
    int many = count > 1 ? atoi(arguments[1]) : 100;
    HsaVersionInfo version;
    say("close before the first open", hsaKmtCloseKFD());
    say("version before the first open", hsaKmtGetVersion(&version));
    say("open", hsaKmtOpenKFD());
    say("open again", hsaKmtOpenKFD());
    say("version", hsaKmtGetVersion(&version));
    printf("interface %u.%u\n", version.KernelInterfaceMajorVersion, version.KernelInterfaceMinorVersion);
    closes_in_a_child();
    say("close", hsaKmtCloseKFD());
    say("version after one of two closes", hsaKmtGetVersion(&version));
    say("close again", hsaKmtCloseKFD());
    say("close once too often", hsaKmtCloseKFD());

    long sizes[2] = {0}, descriptors = 0, threads = 0;
    int failed = 0;
    for (int round = 0; round < many; round++) {
        if (round == 10) { // what is loaded once is loaded now
            sizes[0] = status_field("VmSize");
            descriptors = fds();
            threads = status_field("Threads");
        }
        if (round == 10 + (many - 10) / 2)
            sizes[1] = status_field("VmSize");
        HsaSystemProperties system;
        failed += hsaKmtOpenKFD() != HSAKMT_STATUS_SUCCESS;
        failed += hsaKmtAcquireSystemProperties(&system) != HSAKMT_STATUS_SUCCESS;
        failed += hsaKmtReleaseSystemProperties() != HSAKMT_STATUS_SUCCESS;
        failed += hsaKmtCloseKFD() != HSAKMT_STATUS_SUCCESS;
    }
    printf("rounds: %d failed calls\n", failed);
    printf("descriptors grew by %ld\n", fds() - descriptors);
    printf("threads grew by %ld\n", status_field("Threads") - threads);
    // What leaks grows in both halves. An arena of malloc (64 MiB of addresses) or a kept stack comes once, when threads meet.
    long first = sizes[1] - sizes[0], second = status_field("VmSize") - sizes[1];
    printf("address space grew by %s\n", first < 8 * 1024 || second < 8 * 1024 ? "little" : "much");

    pthread_t pool[8];
    int each[8] = {0}, all = 0;
    for (int number = 0; number < 8; number++)
        if (pthread_create(&pool[number], NULL, rounds, &each[number]))
            return 2;
    for (int number = 0; number < 8; number++) {
        pthread_join(pool[number], NULL);
        all += each[number];
    }
    printf("8 threads: %d failed calls\n", all);
    say("close at the end", hsaKmtCloseKFD());
    return 0;
}
