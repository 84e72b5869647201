// What a process may do with /dev/kfd and a render node beside ioctls: copies of descriptors, fork, exec, threads, wrong
// arguments. It uses libc alone, and prints the same natively and through the seam.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kfd_ioctl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 8
#define ROUNDS 40

static const char *name(int error)
{
	return error ? strerrorname_np(error) : "ok";
}

static const char *version(int fd)
{
	struct kfd_ioctl_get_version_args args = {0};
	if (ioctl(fd, AMDKFD_IOC_GET_VERSION, &args) != 0)
		return name(errno);
	return args.major_version == 1 ? "ok" : "another version";
}

static int cloexec(int fd)
{
	return fcntl(fd, F_GETFD) & FD_CLOEXEC ? 1 : 0;
}

static __u32 create_event(int kfd)
{
	struct kfd_ioctl_create_event_args args = {.event_type = KFD_IOC_EVENT_SIGNAL, .auto_reset = 1};
	return ioctl(kfd, AMDKFD_IOC_CREATE_EVENT, &args) == 0 ? args.event_id : 0;
}

static int set_event(int kfd, __u32 event)
{
	struct kfd_ioctl_set_event_args args = {.event_id = event};
	return ioctl(kfd, AMDKFD_IOC_SET_EVENT, &args) == 0 ? 0 : errno;
}

static int destroy_event(int kfd, __u32 event)
{
	struct kfd_ioctl_destroy_event_args args = {.event_id = event};
	return ioctl(kfd, AMDKFD_IOC_DESTROY_EVENT, &args) == 0 ? 0 : errno;
}

// The result of the wait, or the error, negated.
static int wait_event(int kfd, __u32 event, __u32 milliseconds)
{
	struct kfd_event_data data = {.event_id = event};
	struct kfd_ioctl_wait_events_args args = {
		.events_ptr = (__u64)&data, .num_events = 1, .wait_for_all = 1, .timeout = milliseconds,
	};
	return ioctl(kfd, AMDKFD_IOC_WAIT_EVENTS, &args) == 0 ? (int)args.wait_result : -errno;
}

static void descriptors(int kfd)
{
	printf("= descriptors\n");
	struct stat status;
	int error = fstat(kfd, &status) ? errno : 0;
	printf("fstat: %s, a character device: %d\n", name(error), S_ISCHR(status.st_mode) ? 1 : 0);
	printf("close on exec: %d\n", cloexec(kfd));
	int copy = dup(kfd);
	printf("dup: %s, close on exec: %d\n", version(copy), cloexec(copy));
	int other = fcntl(kfd, F_DUPFD_CLOEXEC, 100);
	printf("F_DUPFD_CLOEXEC: %s, at least 100: %d, close on exec: %d\n", version(other), other >= 100, cloexec(other));
	int null = open("/dev/null", O_RDWR);
	printf("no device: %s\n", version(null));
	printf("dup2 over it: %s\n", version(dup2(kfd, null)));
	close(copy);
	printf("the copy is closed: %s\n", version(copy));
	printf("the others are not: %s %s\n", version(null), version(other));
	close(null);
	close(other);
	struct pollfd polled = {.fd = kfd, .events = POLLIN};
	printf("poll: %d\n", poll(&polled, 1, 0));
	int second = open("/dev/kfd", O_RDWR);
	printf("opened once more: %s, close on exec: %d\n", version(second), cloexec(second));
	close(second);
}

static void arguments(int kfd)
{
	printf("= arguments\n");
	printf("null: %s\n", ioctl(kfd, AMDKFD_IOC_GET_VERSION, NULL) ? name(errno) : "ok");
	printf("no such number: %s\n", ioctl(kfd, _IOR('K', 0x7f, int), NULL) ? name(errno) : "ok");
	struct kfd_ioctl_free_memory_of_gpu_args handle = {.handle = 0x1234};
	printf("no such buffer: %s\n", ioctl(kfd, AMDKFD_IOC_FREE_MEMORY_OF_GPU, &handle) ? name(errno) : "ok");
	printf("no such event: %s\n", name(set_event(kfd, 77)));
	struct kfd_ioctl_alloc_memory_of_gpu_args memory = {.size = 4096, .gpu_id = 1, .flags = KFD_IOC_ALLOC_MEM_FLAGS_VRAM};
	printf("no such GPU: %s\n", ioctl(kfd, AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, &memory) ? name(errno) : "ok");
	void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, kfd, 0x1000);
	printf("no such map: %s\n", map == MAP_FAILED ? name(errno) : "ok");
}

static void files(void)
{
	printf("= files\n");
	DIR *nodes = opendir("/sys/class/kfd/kfd/topology/nodes");
	int count = 0;
	for (struct dirent *entry; nodes && (entry = readdir(nodes));)
		count += entry->d_name[0] != '.';
	printf("nodes: %d\n", count);
	if (nodes)
		closedir(nodes);
	FILE *file = fopen("/sys/devices/virtual/kfd/kfd/topology/nodes/1/gpu_id", "r");
	int gpu = 0;
	printf("a GPU's id: %d\n", file && fscanf(file, "%d", &gpu) == 1 && gpu != 0);
	if (file)
		fclose(file);
	printf("no such file: %s\n", open("/sys/class/kfd/kfd/topology/nodes/99/gpu_id", O_RDONLY) < 0 ? name(errno) : "ok");
	printf("writing: %s\n", open("/sys/class/kfd/kfd/topology/generation_id", O_WRONLY) < 0 ? name(errno) : "ok");
	printf("access: %s\n", access("/dev/kfd", R_OK | W_OK) ? name(errno) : "ok");
}

struct worker {
	pthread_t thread;
	int kfd;
	int failures;
};

static void *work(void *argument)
{
	struct worker *worker = argument;
	for (int round = 0; round < ROUNDS; round++) {
		__u32 event = create_event(worker->kfd);
		worker->failures += event == 0;
		worker->failures += wait_event(worker->kfd, event, 1) != KFD_IOC_WAIT_RESULT_TIMEOUT;
		worker->failures += set_event(worker->kfd, event) != 0;
		worker->failures += wait_event(worker->kfd, event, 10000) != KFD_IOC_WAIT_RESULT_COMPLETE;
		worker->failures += destroy_event(worker->kfd, event) != 0;
	}
	return NULL;
}

struct sleeper {
	int kfd;
	__u32 event;
	int result;
};

static void *sleep_on(void *argument)
{
	struct sleeper *sleeper = argument;
	sleeper->result = wait_event(sleeper->kfd, sleeper->event, 0xffffffff);
	return NULL;
}

static void threads(int kfd)
{
	printf("= threads\n");
	struct worker workers[THREADS] = {0};
	for (int i = 0; i < THREADS; i++) {
		workers[i].kfd = kfd;
		pthread_create(&workers[i].thread, NULL, work, &workers[i]);
	}
	int failures = 0;
	for (int i = 0; i < THREADS; i++) {
		pthread_join(workers[i].thread, NULL);
		failures += workers[i].failures;
	}
	printf("events in %d threads, failures: %d\n", THREADS, failures);
	for (int destroy = 0; destroy < 2; destroy++) {
		struct sleeper sleeper = {.kfd = kfd, .event = create_event(kfd)};
		pthread_t thread;
		pthread_create(&thread, NULL, sleep_on, &sleeper);
		usleep(50000);
		int error = destroy ? destroy_event(kfd, sleeper.event) : set_event(kfd, sleeper.event);
		pthread_join(thread, NULL);
		// EIO if it slept, EINVAL if it came too late.
		if (destroy)
			printf("a sleeper, destroyed: %s, it failed: %d\n", name(error), sleeper.result < 0);
		else
			printf("a sleeper, set: %s, it has %d\n", name(error), sleeper.result);
	}
}

static void child(int kfd, int alone)
{
	printf("in a child: %s\n", version(kfd));
	if (alone) {
		fflush(stdout);
		_exit(0);
	}
	int own = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	printf("opened in a child: %s\n", version(own));
	__u32 event = create_event(own);
	printf("an event of the child's: %s\n", event ? name(set_event(own, event)) : "none");
	fflush(stdout);
	_exit(0);
}

static void after(pid_t pid)
{
	int status = -1;
	waitpid(pid, &status, 0);
	printf("the child ended with: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

static void processes(int kfd, const char *self, int alone)
{
	printf("= processes\n");
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0)
		child(kfd, alone);
	after(pid);
	printf("the parent goes on: %s\n", version(kfd));
	if (alone)
		return;
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		execl(self, self, "executed", (char *)NULL);
		_exit(127);
	}
	after(pid);
	fflush(stdout);
	pid = vfork();
	if (pid == 0) {
		execl(self, self, "executed", (char *)NULL);
		_exit(127);
	}
	after(pid);
	printf("the parent goes on: %s\n", version(kfd));
}

int main(int count, char **arguments_)
{
	// In loop-back a process is a guest of its own, and no other one can have the host.
	int alone = count > 1 && strcmp(arguments_[1], "alone") == 0;
	if (count > 1 && !alone) {
		int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
		printf("executed: %s\n", version(kfd));
		return 0;
	}
	int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	printf("open: %s\n", version(kfd));
	descriptors(kfd);
	arguments(kfd);
	files();
	threads(kfd);
	processes(kfd, arguments_[0], alone);
	close(kfd);
	printf("closed: %s\n", version(kfd));
	kfd = open("/dev/kfd", O_RDWR);
	printf("opened again: %s\n", version(kfd));
	printf("= end\n");
	return 0;
}
