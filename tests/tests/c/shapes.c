// Processes and threads that use /dev/kfd at once: forks of all shapes, also while threads are inside ioctls, programs that are executed with a
// descriptor, short processes, signals of a timer. It uses libc alone. `expect` counts lines that are not what the kernel does.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expect.h"

extern char **environ;

// Seconds after which a process that hangs is killed; a guest's CPU may be emulated.
#define PATIENCE 120

static int scale = 1;
static const char *self;

// Opens, makes an event, waits for it in vain, sets it, waits for it, destroys it, closes: 0, or the number of the step that failed.
static int round_trip(void)
{
	int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	if (kfd < 0)
		return 1;
	struct kfd_ioctl_create_event_args made = {.event_type = KFD_IOC_EVENT_SIGNAL, .auto_reset = 1};
	if (ioctl(kfd, AMDKFD_IOC_CREATE_EVENT, &made))
		return 2;
	struct kfd_event_data data = {.event_id = made.event_id};
	struct kfd_ioctl_wait_events_args waits = {.events_ptr = (__u64)&data, .num_events = 1, .wait_for_all = 1};
	if (ioctl(kfd, AMDKFD_IOC_WAIT_EVENTS, &waits) || waits.wait_result != KFD_IOC_WAIT_RESULT_TIMEOUT)
		return 3;
	struct kfd_ioctl_set_event_args set = {.event_id = made.event_id};
	if (ioctl(kfd, AMDKFD_IOC_SET_EVENT, &set))
		return 4;
	waits.timeout = 20000;
	int result;
	// The thunk repeats it as well (kmtIoctl).
	while ((result = ioctl(kfd, AMDKFD_IOC_WAIT_EVENTS, &waits)) && errno == EINTR)
		;
	if (result || waits.wait_result != KFD_IOC_WAIT_RESULT_COMPLETE)
		return 5;
	struct kfd_ioctl_destroy_event_args destroy = {.event_id = made.event_id};
	if (ioctl(kfd, AMDKFD_IOC_DESTROY_EVENT, &destroy))
		return 6;
	return close(kfd) ? 7 : 0;
}

static int ended(pid_t pid)
{
	int status = -1;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// Forks a child that runs `body` and ends with its result, or is killed.
static pid_t child(int (*body)(int), int argument)
{
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		alarm(PATIENCE);
		int result = body(argument);
		fflush(stdout);
		_exit(result);
	}
	return pid;
}

static int inherited(int kfd)
{
	expect("EBADF", "a child has it not: %s", version(kfd));
	expect("0", "a child's own: %d", round_trip());
	return wrong;
}

static int grandchild(int kfd)
{
	expect("EBADF", "a grandchild has it not: %s", version(kfd));
	expect("0", "a grandchild's own: %d", round_trip());
	return wrong;
}

static int between(int kfd)
{
	int own = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	expect("ok", "a child between: %s", version(own));
	expect("0", "its child ended with: %d", ended(child(grandchild, kfd)));
	expect("0", "so did its own's child: %d", ended(child(grandchild, own)));
	expect("ok", "the child between goes on: %s", version(own));
	return wrong;
}

static int without(int argument)
{
	(void)argument;
	return round_trip();
}

static void forks(void)
{
	puts("= forks");
	expect("0", "fork before the first use: %d", ended(child(without, 0)));
	int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	expect("ok", "open: %s", version(kfd));
	expect("0", "the child ended with: %d", ended(child(inherited, kfd)));
	expect("0", "the child ended with: %d", ended(child(between, kfd)));
	pid_t children[8];
	for (int i = 0; i < 8; i++)
		children[i] = child(without, 0);
	int failed = 0;
	for (int i = 0; i < 8; i++)
		failed += ended(children[i]) != 0;
	expect("0", "of 8 at once failed: %d", failed);
	expect("ok", "the parent goes on: %s", version(kfd));
	expect("0", "and can open it anew: %d", round_trip());
	close(kfd);
}

// `close_on_exec` of the descriptor whose number the program gets.
static pid_t executed(int shape, int kfd)
{
	char number[16];
	snprintf(number, sizeof number, "%d", kfd);
	char *arguments[] = {(char *)self, "executed", number, NULL};
	pid_t pid;
	fflush(stdout);
	if (shape == 2)
		return posix_spawn(&pid, self, NULL, NULL, arguments, environ) ? -1 : pid;
	pid = shape ? vfork() : fork();
	if (pid == 0) {
		execv(self, arguments);
		_exit(127);
	}
	return pid;
}

static void programs(void)
{
	puts("= programs");
	static const char *const shapes[] = {"fork and exec", "vfork and exec", "posix_spawn"};
	int kept = open("/dev/kfd", O_RDWR), closed = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	for (int shape = 0; shape < 3; shape++) {
		expect("0", "%s, inherited: %d", shapes[shape], ended(executed(shape, kept)));
		expect("0", "%s, closed: %d", shapes[shape], ended(executed(shape, closed)));
	}
	expect("ok ok", "the parent goes on: %s %s", version(kept), version(closed));
	close(kept);
	close(closed);
	int failed = 0, most = 15 * scale;
	for (int i = 0; i < most; i++)
		failed += ended(executed(2, -1)) != 0;
	expect("0", "of short processes failed: %d", failed);
	expect("0", "after them: %d", round_trip());
}

// In the program that was executed. A descriptor that came along is no device of its process.
static int alone(int kfd)
{
	const char *answer = version(kfd);
	alarm(PATIENCE);
	return strcmp(answer, "EBADF") ? 100 : round_trip();
}

static atomic_int stop, failures;

static void *around(void *argument)
{
	(void)argument;
	while (!atomic_load(&stop))
		if (round_trip())
			atomic_fetch_add(&failures, 1);
	return NULL;
}

static void *times(void *argument)
{
	int *rounds = argument;
	for (int i = 0; i < *rounds; i++)
		if (round_trip())
			atomic_fetch_add(&failures, 1);
	return NULL;
}

static void threads(void)
{
	puts("= threads");
	pthread_t workers[8];
	int rounds = 10 * scale;
	atomic_store(&failures, 0);
	for (int i = 0; i < 8; i++)
		pthread_create(&workers[i], NULL, times, &rounds);
	for (int i = 0; i < 8; i++)
		pthread_join(workers[i], NULL);
	expect("0", "open and close in 8 threads, failures: %d", atomic_load(&failures));
}

// ROCm/rocm-systems#8750: whatever lock a thread holds at the moment of a fork, the child must not wait for it.
static void forks_in_threads(void)
{
	puts("= forks beside threads");
	pthread_t workers[4];
	atomic_store(&stop, 0);
	atomic_store(&failures, 0);
	for (int i = 0; i < 4; i++)
		pthread_create(&workers[i], NULL, around, NULL);
	int failed = 0, most = 10 * scale;
	for (int i = 0; i < most; i++)
		failed += ended(child(without, 0)) != 0;
	expect("0", "of the children failed: %d", failed);
	failed = 0;
	for (int i = 0; i < most / 2; i++)
		failed += ended(executed(2, -1)) != 0;
	expect("0", "of the programs failed: %d", failed);
	atomic_store(&stop, 1);
	for (int i = 0; i < 4; i++)
		pthread_join(workers[i], NULL);
	expect("0", "of the threads' rounds failed: %d", atomic_load(&failures));
}

static atomic_int ticks;

static void tick(int signal)
{
	(void)signal;
	atomic_fetch_add(&ticks, 1);
}

// ROCm/rocm-systems#2540: signals, here without SA_RESTART, neither hide the device nor lose a call.
static void timer(void)
{
	puts("= a timer");
	struct sigaction action = {.sa_handler = tick};
	sigaction(SIGALRM, &action, NULL);
	struct itimerval each = {{0, 1000}, {0, 1000}}, none = {0};
	int failed = 0;
	setitimer(ITIMER_REAL, &each, NULL);
	for (int i = 0; i < 20 * scale; i++)
		failed += round_trip() != 0;
	setitimer(ITIMER_REAL, &none, NULL);
	expect("0", "of the rounds failed: %d", failed);
	signal(SIGALRM, SIG_DFL);
}

static void timed_start(void)
{
	struct sigaction action = {.sa_handler = tick};
	sigaction(SIGALRM, &action, NULL);
	struct itimerval each = {{0, 1000}, {0, 1000}}, none = {0};
	setitimer(ITIMER_REAL, &each, NULL);
	int result = round_trip();
	setitimer(ITIMER_REAL, &none, NULL);
	_exit(result);
}

int main(int count, char **arguments)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	self = arguments[0];
	if (count > 2 && !strcmp(arguments[1], "executed"))
		return alone(atoi(arguments[2]));
	if (count > 1 && !strcmp(arguments[1], "start"))
		timed_start();
	// In a container of its own it may be process 1, and its number another one outside.
	if (count > 1 && !strcmp(arguments[1], "one")) {
		expect("1 0", "process: %d %d", getpid(), round_trip());
		expect("0", "its child: %d", ended(child(without, 0)));
		return wrong;
	}
	int one_process = count > 1 && !strcmp(arguments[1], "alone");
	if (count > 1 && !one_process)
		scale = atoi(arguments[1]);
	threads();
	timer();
	if (!one_process) {
		forks();
		programs();
		forks_in_threads();
		puts("= starts under a timer");
		int failed = 0;
		for (int i = 0; i < 10 * scale; i++) {
			char *start[] = {(char *)self, "start", NULL};
			pid_t pid;
			failed += posix_spawn(&pid, self, NULL, NULL, start, environ) ? 1 : ended(pid) != 0;
		}
		expect("0", "failed: %d", failed);
	}
	printf("= %d wrong\n", wrong);
	return wrong ? 1 : 0;
}
