/* Lines whose right end is known from the kernel's source, and a question to /dev/kfd: for programs on libc alone. The program that
 * includes this defines _GNU_SOURCE. */
#ifndef EXPECT_H
#define EXPECT_H

#include <errno.h>
#include <linux/kfd_ioctl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>

/* Lines that were otherwise. */
static int wrong;

static inline const char *name(int error)
{
	return error ? strerrorname_np(error) : "ok";
}

/* Prints a line, and whether it is the expected one where it is not. */
__attribute__((format(printf, 2, 3))) static inline void expect(const char *expected, const char *format, ...)
{
	char line[512];
	va_list list;
	va_start(list, format);
	vsnprintf(line, sizeof line, format, list);
	va_end(list);
	const char *end = strstr(line, ": ");
	if (!end || strcmp(end + 2, expected)) {
		wrong++;
		printf("%s (expected %s)\n", line, expected);
	} else {
		puts(line);
	}
}

/* What AMDKFD_IOC_GET_VERSION answers on a descriptor. */
static inline const char *version(int fd)
{
	struct kfd_ioctl_get_version_args args = {0};
	if (ioctl(fd, AMDKFD_IOC_GET_VERSION, &args) != 0)
		return name(errno);
	return args.major_version == 1 ? "ok" : "another version";
}

#endif
