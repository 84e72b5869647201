// /dev/kfd, the render node and their files in sysfs by every way that libc has to them: copies of descriptors, flags, paths relative
// to directories and to descriptors, waiting, closing, passing on. It uses libc alone. Lines whose right end is known from the kernel's source
// are checked here too: `expect` counts those that are otherwise.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "expect.h"

static char node[64];

static const char *render(int fd)
{
	static char driver[32];
	struct drm_version version = {.name_len = sizeof driver - 1, .name = driver};
	if (ioctl(fd, DRM_IOCTL_VERSION, &version) != 0)
		return name(errno);
	driver[version.name_len < sizeof driver ? version.name_len : 0] = 0;
	return strcmp(driver, "amdgpu") ? driver : "ok";
}

// Opens, asks, closes.
static const char *opened(int fd, const char *(*ask)(int))
{
	if (fd < 0)
		return name(errno);
	const char *answer = ask(fd);
	close(fd);
	return answer;
}

static int cloexec(int fd)
{
	int flags = fcntl(fd, F_GETFD);
	return flags < 0 ? -1 : !!(flags & FD_CLOEXEC);
}

// What fcntl shows of an open file, without what libc adds.
static const char *mode(int fd)
{
	static char text[64];
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return name(errno);
	const char *access[] = {"O_RDONLY", "O_WRONLY", "O_RDWR", "?"};
	snprintf(text, sizeof text, "%s%s", access[flags & O_ACCMODE], flags & O_NONBLOCK ? "|O_NONBLOCK" : "");
	return text;
}

static void copies(const char *path, const char *(*ask)(int))
{
	printf("= copies of %s\n", ask == version ? "the device" : "the render node");
	int fd = open(path, O_RDWR | O_CLOEXEC);
	expect("ok 1 O_RDWR", "open: %s %d %s", ask(fd), cloexec(fd), mode(fd));
	int first = dup(fd);
	int second = fcntl(fd, F_DUPFD, 200);
	int third = fcntl(fd, F_DUPFD_CLOEXEC, 200);
	int fourth = open("/dev/null", O_RDONLY);
	expect("1", "dup3 gives the number: %d", dup3(fd, fourth, O_CLOEXEC) == fourth);
	expect("0 0 1 1", "close on exec: %d %d %d %d", cloexec(first), cloexec(second), cloexec(third), cloexec(fourth));
	expect("1 1", "at least 200: %d %d", second >= 200, third > second);
	expect("EINVAL", "dup3 to itself: %s", dup3(fd, fd, 0) < 0 ? name(errno) : "ok");
	expect("1", "dup2 to itself: %d", dup2(fd, fd) == fd);
	expect("EBADF", "dup2 to a number that cannot be: %s", dup2(fd, -1) < 0 ? name(errno) : "ok");
	expect("EINVAL", "dup3 with another flag: %s", dup3(fd, fourth, O_APPEND) < 0 ? name(errno) : "ok");
	expect("ok", "and nothing is lost: %s", ask(fourth));
	close(fd);
	expect("EBADF", "closed: %s", ask(fd));
	char line[64];
	snprintf(line, sizeof line, "the copies go on: %s ", ask(first));
	expect("ok ok ok ok", "%s%s %s %s", line, ask(second), ask(third), ask(fourth));
	int result = fcntl(first, F_SETFD, FD_CLOEXEC);
	expect("0 1", "F_SETFD: %d %d", result, cloexec(first));
	result = fcntl(first, F_SETFD, 0);
	expect("0 0", "F_SETFD: %d %d", result, cloexec(first));
	result = ioctl(first, FIOCLEX);
	expect("0 1", "FIOCLEX: %d %d", result, cloexec(first));
	result = ioctl(first, FIONCLEX);
	expect("0 0", "FIONCLEX: %d %d", result, cloexec(first));
	result = fcntl(first, F_SETFL, O_NONBLOCK);
	expect("0 O_RDWR|O_NONBLOCK", "F_SETFL: %d %s", result, mode(second));
	result = fcntl(first, F_SETFL, 0);
	expect("0 O_RDWR", "F_SETFL: %d %s", result, mode(second));
	int pipes[2];
	if (pipe(pipes) == 0) {
		expect("1", "dup2 over a copy: %d", dup2(pipes[0], second) == second);
		expect("ENOTTY", "it is a pipe now: %s", ask(second));
		expect("1", "dup2 over a pipe: %d", dup2(first, pipes[1]) == pipes[1]);
		expect("ok", "it is the device now: %s", ask(pipes[1]));
		close(pipes[0]);
		close(pipes[1]);
	}
	close(second);
	close(third);
	close(fourth);
	expect("ok", "the last copy: %s", ask(first));
	expect("0", "closed: %d", close(first));
	expect("EBADF", "closed twice: %s", close(first) ? name(errno) : "ok");
	int read_only = open(path, O_RDONLY | O_NONBLOCK);
	char flags[64];
	snprintf(flags, sizeof flags, "%s", mode(read_only));
	expect("ok O_RDONLY|O_NONBLOCK 0", "read only: %s %s %d", ask(read_only), flags, cloexec(read_only));
	close(read_only);
	int write_only = open(path, O_WRONLY);
	expect("ok O_WRONLY", "write only: %s %s", ask(write_only), mode(write_only));
	close(write_only);
	expect("EEXIST", "O_EXCL: %s", open(path, O_RDWR | O_CREAT | O_EXCL, 0600) < 0 ? name(errno) : "ok");
	expect("ENOTDIR", "O_DIRECTORY: %s", open(path, O_RDWR | O_DIRECTORY) < 0 ? name(errno) : "ok");
	expect("ok", "O_CREAT: %s", opened(open(path, O_RDWR | O_CREAT, 0600), ask));
	expect("ok", "O_NOFOLLOW: %s", opened(open(path, O_RDWR | O_NOFOLLOW), ask));
	int by_path = open(path, O_PATH);
	expect("EBADF", "O_PATH is not for ioctls: %s", ask(by_path));
	struct stat status;
	result = fstat(by_path, &status);
	expect("0 1", "but for fstat: %d %d", result, S_ISCHR(status.st_mode) ? 1 : 0);
	snprintf(line, sizeof line, "/proc/self/fd/%d", by_path);
	expect("ok", "and can be opened by /proc: %s", opened(open(line, O_RDWR), ask));
	close(by_path);
}

// kfd_chardev.c has neither read nor write nor llseek nor poll: EINVAL, ESPIPE and always ready, and no epoll.
static void waiting(void)
{
	puts("= waiting");
	int fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	struct pollfd polled = {.fd = fd, .events = POLLIN | POLLOUT | POLLRDNORM | POLLWRNORM};
	expect("1", "poll: %d", poll(&polled, 1, 0));
	expect("1", "ready for all: %d", polled.revents == (POLLIN | POLLOUT | POLLRDNORM | POLLWRNORM));
	fd_set reads, writes;
	FD_ZERO(&reads);
	FD_ZERO(&writes);
	FD_SET(fd, &reads);
	FD_SET(fd, &writes);
	struct timeval none = {0};
	expect("2", "select: %d", select(fd + 1, &reads, &writes, NULL, &none));
	int waits = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN};
	expect("EPERM", "epoll: %s", epoll_ctl(waits, EPOLL_CTL_ADD, fd, &event) ? name(errno) : "ok");
	close(waits);
	expect("ESPIPE", "lseek: %s", lseek(fd, 0, SEEK_SET) < 0 ? name(errno) : "ok");
	expect("ESPIPE", "lseek: %s", lseek(fd, 0, SEEK_END) < 0 ? name(errno) : "ok");
	expect("ENODEV", "a wrong place is no map: %s",
		mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0x3ull << 62 | 0x7fffull << 46) == MAP_FAILED ? name(errno) : "ok");
	expect("EINVAL", "no length is no map: %s", mmap(NULL, 0, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED ? name(errno) : "ok");
	expect("EINVAL", "half a page is no place: %s",
		mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0x800) == MAP_FAILED ? name(errno) : "ok");
	close(fd);
	// ROCm/rocm-systems#8812: what the driver does not know fails, whatever errno was before.
	fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	int numbers[] = {0x00, 0x7f, 0x80, 0xff, 0x100 - 1};
	for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
		errno = i ? 99 : 0;
		int result = ioctl(fd, _IOC(_IOC_READ | _IOC_WRITE, 'K', numbers[i], 16), NULL);
		expect("-1 ENOTTY", "number 0x%02x: %d %s", numbers[i], result, name(errno));
	}
	errno = 99;
	int result = ioctl(fd, 0x4b7f, NULL);
	expect("-1 ENOTTY", "0x4b7f: %d %s", result, name(errno));
	expect("ok 22", "the next one works: %s %d", version(fd), (errno = 22));
	close(fd);
	fd = open(node, O_RDWR | O_CLOEXEC);
	expect("ESPIPE", "lseek on a render node: %s", lseek(fd, 0, SEEK_SET) < 0 ? name(errno) : "ok");
	expect("EINVAL", "no such ioctl there: %s", ioctl(fd, _IO('d', 0x9f)) ? name(errno) : "ok");
	expect("EINVAL", "nor there: %s",
		mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0x7ffffff000) == MAP_FAILED ? name(errno) : "ok");
	expect("ok", "the next one works: %s", render(fd));
	close(fd);
}

static void paths(void)
{
	puts("= paths");
	int dev = open("/dev", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	expect("ok", "from /dev: %s", opened(openat(dev, "kfd", O_RDWR), version));
	expect("ok", "from /dev by a detour: %s", opened(openat(dev, "./shm/..//kfd", O_RDWR), version));
	expect("ok", "an absolute one from /dev: %s", opened(openat(dev, "/dev/kfd", O_RDWR), version));
	char relative[80];
	snprintf(relative, sizeof relative, "dri/%s", strrchr(node, '/') + 1);
	expect("ok", "a render node from /dev: %s", opened(openat(dev, relative, O_RDWR), render));
	struct stat status;
	int result = fstatat(dev, "kfd", &status, 0);
	expect("0 1", "fstatat from /dev: %d %d", result, S_ISCHR(status.st_mode) ? 1 : 0);
	expect("0", "faccessat from /dev: %d", faccessat(dev, "kfd", R_OK | W_OK, 0));
	struct statx extended;
	result = statx(dev, "kfd", 0, STATX_BASIC_STATS, &extended);
	expect("0 1", "statx from /dev: %d %d", result, S_ISCHR(extended.stx_mode) ? 1 : 0);
	expect("ENOENT", "nothing else: %s", openat(dev, "kfd2", O_RDWR) < 0 ? name(errno) : "ok");
	close(dev);
	int dri = open("/dev/dri", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	expect("ok", "from /dev/dri: %s", opened(openat(dri, strrchr(node, '/') + 1, O_RDWR), render));
	close(dri);
	char before[PATH_MAX];
	if (getcwd(before, sizeof before) && chdir("/dev") == 0) {
		expect("ok", "in /dev: %s", opened(open("kfd", O_RDWR), version));
		expect("ok", "in /dev: %s", opened(open("./kfd", O_RDWR), version));
		expect("0", "stat in /dev: %d", stat("kfd", &status));
		FILE *file = fopen("../sys/class/kfd/kfd/topology/nodes/1/gpu_id", "r");
		expect("1", "fopen in /dev: %d", file != NULL);
		if (file)
			fclose(file);
		DIR *nodes = opendir("../sys/class/kfd/kfd/topology/nodes");
		expect("1", "opendir in /dev: %d", nodes != NULL);
		if (nodes)
			closedir(nodes);
		expect("0", "back: %d", chdir(before));
	}
	int fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	char path[64], target[PATH_MAX] = "";
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	expect("ok", "by /proc: %s", opened(open(path, O_RDWR), version));
	result = stat(path, &status);
	expect("0 1", "stat by /proc: %d %d", result, S_ISCHR(status.st_mode) ? 1 : 0);
	result = lstat(path, &status);
	expect("0 1", "lstat by /proc: %d %d", result, S_ISLNK(status.st_mode) ? 1 : 0);
	ssize_t length = readlink(path, target, sizeof target - 1);
	target[length > 0 ? length : 0] = 0;
	expect("/dev/kfd", "readlink by /proc: %s", target);
	expect("/dev/kfd", "realpath by /proc: %s", realpath(path, target) ? target : name(errno));
	snprintf(path, sizeof path, "/dev/fd/%d", fd);
	expect("ok", "by /dev/fd: %s", opened(open(path, O_RDWR), version));
	snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
	expect("ok", "by the process's number: %s", opened(open(path, O_RDWR), version));
	close(fd);
	expect("ENOENT", "closed: %s", open(path, O_RDWR) < 0 ? name(errno) : "ok");
	expect("ENOTDIR", "below it: %s", open("/dev/kfd/x", O_RDWR) < 0 ? name(errno) : "ok");
	expect("ENOTDIR", "as a directory: %s", open("/dev/kfd/", O_RDWR) < 0 ? name(errno) : "ok");
}

static void status(const char *path)
{
	struct stat one, two, three;
	struct statx four;
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	int results = stat(path, &one) | lstat(path, &two) | fstat(fd, &three) | statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &four);
	int same = one.st_ino == three.st_ino && one.st_rdev == three.st_rdev && one.st_mode == three.st_mode && one.st_ino == four.stx_ino
		&& one.st_mode == four.stx_mode && one.st_rdev == makedev(four.stx_rdev_major, four.stx_rdev_minor)
		&& one.st_dev == makedev(four.stx_dev_major, four.stx_dev_minor);
	printf("%s: %d, the same: %d, mode 0%o, link mode 0%o, links %lu\n", strncmp(path, "/dev/dri", 8) ? path : "render node", results,
		same, one.st_mode, two.st_mode, (unsigned long)one.st_nlink);
	close(fd);
}

static int not_dots(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

static void files(void)
{
	puts("= files");
	status("/dev/kfd");
	status(node);
	status("/sys/class/kfd/kfd/topology/generation_id");
	status("/sys/class/kfd/kfd/topology/nodes");
	status("/sys/class/kfd/kfd");
	expect("0 0 0", "access: %d %d %d", access("/dev/kfd", F_OK), access("/dev/kfd", R_OK | W_OK), access(node, R_OK | W_OK));
	expect("EACCES", "no program: %s", access("/dev/kfd", X_OK) ? name(errno) : "ok");
	expect("0 0", "euidaccess: %d %d", euidaccess("/dev/kfd", R_OK), eaccess(node, W_OK));
	struct dirent **list;
	int count = scandir("/sys/class/kfd/kfd/topology/nodes", &list, not_dots, alphasort);
	printf("scandir: %d", count);
	for (int i = 0; i < count; i++)
		printf(" %s", list[i]->d_name);
	puts("");
	glob_t found;
	int result = glob("/sys/class/kfd/kfd/topology/nodes/[0-9]*/gpu_id", 0, NULL, &found);
	printf("glob: %d", result);
	for (size_t i = 0; result == 0 && i < found.gl_pathc; i++)
		printf(" %s", found.gl_pathv[i]);
	puts("");
	// CPU nodes differ between machines; the GPU's are the host's.
	DIR *nodes = opendir("/sys/class/kfd/kfd/topology/nodes/1");
	int names = 0;
	for (struct dirent *entry; nodes && (entry = readdir(nodes));)
		names += entry->d_name[0] != '.';
	printf("names in a node: %d, rewound:", names);
	if (nodes) {
		rewinddir(nodes);
		for (struct dirent *entry; (entry = readdir(nodes));)
			names -= entry->d_name[0] != '.';
		closedir(nodes);
	}
	printf(" %d\n", names);
	char path[128], target[PATH_MAX];
	struct stat device = {0};
	expect("0", "the device's number: %d", stat(node, &device));
	snprintf(path, sizeof path, "/sys/dev/char/%u:%u/device", major(device.st_rdev), minor(device.st_rdev));
	char *real = realpath(path, target);
	expect("1", "a PCI device: %d", real && !strncmp(real, "/sys/devices/pci", 16));
	snprintf(path, sizeof path, "/sys/dev/char/%u:%u/device/vendor", major(device.st_rdev), minor(device.st_rdev));
	FILE *file = fopen(path, "re");
	unsigned vendor = 0;
	int read = file && fscanf(file, "%x", &vendor) == 1;
	expect("1 0x1002", "its vendor: %d 0x%x", read, vendor);
	if (file)
		fclose(file);
	snprintf(path, sizeof path, "/sys/dev/char/%u:%u/device/drm/%s", major(device.st_rdev), minor(device.st_rdev), strrchr(node, '/') + 1);
	expect("0", "its node there: %d", access(path, F_OK));
	ssize_t length = readlink("/sys/class/kfd/kfd", target, sizeof target - 1);
	target[length > 0 ? length : 0] = 0;
	expect("../../devices/virtual/kfd/kfd", "the class's link: %s", target);
	expect("EINVAL", "no link: %s", readlink("/dev/kfd", target, sizeof target) < 0 ? name(errno) : "ok");
}

static int pass_on(int socket, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec data = {&byte, 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	*header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
	memcpy(CMSG_DATA(header), &fd, sizeof fd);
	return sendmsg(socket, &message, 0) == 1 ? 0 : -1;
}

static int take(int socket)
{
	int fd = -1;
	char byte, control[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec data = {&byte, 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&message))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
	return fd;
}

// kfd_ioctl: only the process that opened the file may use it. A render node's file works elsewhere on a device, and not
// here (docs/limits.md), so nothing is asked of it.
static void passing(void)
{
	puts("= passing on");
	int sockets[2], fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
		return;
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		int own = take(sockets[1]);
		expect("EBADF", "in another process: %s", version(own));
		fflush(stdout);
		_exit(wrong ? 1 : 0);
	}
	// Said when the other process has ended, so that the lines come in order.
	int sent = pass_on(sockets[0], fd);
	int ended = -1;
	waitpid(child, &ended, 0);
	expect("0", "sent: %d", sent);
	expect("0", "the other process: %d", ended);
	wrong += ended != 0;
	expect("ok", "the sender goes on: %s", version(fd));
	close(fd);
	close(sockets[0]);
	close(sockets[1]);
}

// A daemon closes all that it does not know, and may then open the device.
static void closing(void)
{
	puts("= closing all");
	int fd = open("/dev/kfd", O_RDWR | O_CLOEXEC), drm = open(node, O_RDWR | O_CLOEXEC);
	for (int number = 3; number < 1024; number++)
		close(number);
	char line[64];
	snprintf(line, sizeof line, "closed one by one: %s", version(fd));
	expect("EBADF EBADF", "%s %s", line, render(drm));
	expect("ok", "opened after that: %s", opened(open("/dev/kfd", O_RDWR), version));
	expect("ok", "and the render node: %s", opened(open(node, O_RDWR), render));
	fd = open("/dev/kfd", O_RDWR | O_CLOEXEC);
	expect("1", "the lowest number: %d", fd == 3);
	int result = close_range(3, ~0u, 0);
	expect("0 EBADF", "close_range: %d %s", result, version(fd));
	expect("ok", "opened after that: %s", opened(open("/dev/kfd", O_RDWR), version));
	fd = open("/dev/kfd", O_RDWR);
	result = close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
	expect("0 ok 1", "close_range that marks: %d %s %d", result, version(fd), cloexec(fd));
	expect("EINVAL", "a range of none: %s", close_range(5, 4, 0) ? name(errno) : "ok");
	closefrom(3);
	expect("EBADF", "closefrom: %s", version(fd));
	expect("ok", "opened after that: %s", opened(open("/dev/kfd", O_RDWR), version));
	int null = open("/dev/null", O_RDWR);
	int taken = 0;
	for (int number = 3; number < 1024; number++)
		taken += dup2(null, number) == number;
	// Of a few numbers the library itself has need; on a device it is none.
	expect("1", "others in their place: %d", taken > 1021 - 10);
	for (int number = 3; number < 1024; number++)
		close(number);
	expect("ok", "opened after that: %s", opened(open("/dev/kfd", O_RDWR), version));
}

static __u32 gpu(void)
{
	char path[96];
	unsigned id = 0;
	for (int i = 0; i < 16 && !id; i++) {
		snprintf(path, sizeof path, "/sys/class/kfd/kfd/topology/nodes/%d/gpu_id", i);
		FILE *file = fopen(path, "re");
		if (!file || fscanf(file, "%u", &id) != 1)
			id = 0;
		if (file)
			fclose(file);
	}
	return id;
}

#define BYTES (1u << 20)

// Allocates and frees: the error of the first call that fails.
static const char *memory(int fd, __u32 id, __u32 flags, void *host)
{
	static __u64 address = 0x200000000000;
	struct kfd_ioctl_alloc_memory_of_gpu_args made = {
		.va_addr = host ? (__u64)host : (address += BYTES), .size = BYTES, .gpu_id = id, .flags = flags, .mmap_offset = (__u64)host,
	};
	if (ioctl(fd, AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, &made))
		return name(errno);
	struct kfd_ioctl_map_memory_to_gpu_args map = {.handle = made.handle, .device_ids_array_ptr = (__u64)&id, .n_devices = 1};
	struct kfd_ioctl_unmap_memory_from_gpu_args unmap = {.handle = made.handle, .device_ids_array_ptr = (__u64)&id, .n_devices = 1};
	struct kfd_ioctl_free_memory_of_gpu_args free = {.handle = made.handle};
	if (ioctl(fd, AMDKFD_IOC_MAP_MEMORY_TO_GPU, &map) || ioctl(fd, AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU, &unmap)
		|| ioctl(fd, AMDKFD_IOC_FREE_MEMORY_OF_GPU, &free))
		return name(errno);
	return "ok";
}

static const char *acquires(int fd, struct kfd_ioctl_acquire_vm_args *vm)
{
	return ioctl(fd, AMDKFD_IOC_ACQUIRE_VM, vm) ? name(errno) : "ok";
}

// No ioctl of a device takes a descriptor, so that a process that has no more can go on.
static void exhausted(void)
{
	puts("= no descriptor left");
	int fd = open("/dev/kfd", O_RDWR | O_CLOEXEC), drm = open(node, O_RDWR | O_CLOEXEC);
	__u32 id = gpu();
	struct kfd_ioctl_acquire_vm_args vm = {.drm_fd = drm, .gpu_id = id};
	expect("ok", "acquire: %s", acquires(fd, &vm));
	expect("ok", "again: %s", acquires(fd, &vm));
	/* kfd_ioctl_acquire_vm(): the file is kept, whatever becomes of its descriptors. */
	vm.drm_fd = dup(drm);
	expect("ok", "by a copy: %s", acquires(fd, &vm));
	int other = open(node, O_RDWR | O_CLOEXEC);
	close(vm.drm_fd);
	vm.drm_fd = other;
	expect("EBUSY", "by another file: %s", acquires(fd, &vm));
	close(drm);
	expect("EBUSY", "with the first one closed: %s", acquires(fd, &vm));
	drm = other;
	struct rlimit limit;
	getrlimit(RLIMIT_NOFILE, &limit);
	rlim_t before = limit.rlim_cur;
	limit.rlim_cur = 64;
	setrlimit(RLIMIT_NOFILE, &limit);
	int taken[64], count = 0;
	while (count < 64 && (taken[count] = open("/dev/null", O_RDONLY)) >= 0)
		count++;
	expect("EMFILE", "the last one: %s", name(errno));
	expect("EMFILE", "a device as well: %s", opened(open("/dev/kfd", O_RDWR), version));
	char line[32];
	snprintf(line, sizeof line, "ioctls: %s", version(fd));
	expect("ok ok", "%s %s", line, render(drm));
	int failed = 0;
	for (int i = 0; i < 50; i++) {
		struct kfd_ioctl_create_event_args made = {.event_type = KFD_IOC_EVENT_SIGNAL, .auto_reset = 1};
		failed += ioctl(fd, AMDKFD_IOC_CREATE_EVENT, &made) != 0;
		struct kfd_ioctl_set_event_args set = {.event_id = made.event_id};
		failed += ioctl(fd, AMDKFD_IOC_SET_EVENT, &set) != 0;
		struct kfd_event_data data = {.event_id = made.event_id};
		struct kfd_ioctl_wait_events_args waits = {
			.events_ptr = (__u64)&data, .num_events = 1, .wait_for_all = 1, .timeout = 20000,
		};
		failed += ioctl(fd, AMDKFD_IOC_WAIT_EVENTS, &waits) || waits.wait_result != KFD_IOC_WAIT_RESULT_COMPLETE;
		struct kfd_ioctl_destroy_event_args destroy = {.event_id = made.event_id};
		failed += ioctl(fd, AMDKFD_IOC_DESTROY_EVENT, &destroy) != 0;
	}
	expect("0", "of 200 calls on events failed: %d", failed);
	const __u32 all = KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE;
	expect("ok", "VRAM: %s", memory(fd, id, KFD_IOC_ALLOC_MEM_FLAGS_VRAM | all, NULL));
	expect("ok", "memory of the system: %s", memory(fd, id, KFD_IOC_ALLOC_MEM_FLAGS_GTT | all, NULL));
	void *host = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	expect("ok", "memory at the program's address: %s",
		memory(fd, id, KFD_IOC_ALLOC_MEM_FLAGS_USERPTR | KFD_IOC_ALLOC_MEM_FLAGS_COHERENT | all, host));
	while (count > 0)
		close(taken[--count]);
	limit.rlim_cur = before;
	setrlimit(RLIMIT_NOFILE, &limit);
	expect("ok", "the device: %s", opened(open("/dev/kfd", O_RDWR), version));
	close(fd);
	close(drm);
}

int main(int count, char **arguments)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	DIR *nodes = opendir("/dev/dri");
	for (struct dirent *entry; nodes && (entry = readdir(nodes));) {
		char path[sizeof entry->d_name + 16];
		snprintf(path, sizeof path, "/dev/dri/%s", entry->d_name);
		if (!strncmp(entry->d_name, "renderD", 7) && !strcmp(opened(open(path, O_RDWR | O_CLOEXEC), render), "ok"))
			snprintf(node, sizeof node, "/dev/dri/%.32s", entry->d_name);
	}
	if (nodes)
		closedir(nodes);
	expect("1", "a render node: %d", node[0] != 0);
	int all = count < 2;
	for (int i = 1; i < count || all; i++) {
		const char *part = all ? "all" : arguments[i];
		if (all || !strcmp(part, "copies")) {
			copies("/dev/kfd", version);
			copies(node, render);
		}
		if (all || !strcmp(part, "waiting"))
			waiting();
		if (all || !strcmp(part, "paths"))
			paths();
		if (all || !strcmp(part, "files"))
			files();
		if (all || !strcmp(part, "passing"))
			passing();
		if (all || !strcmp(part, "exhausted"))
			exhausted();
		if (all || !strcmp(part, "closing"))
			closing();
		if (all)
			break;
	}
	printf("= %d wrong\n", wrong);
	return wrong ? 1 : 0;
}
