/* What a process holds: entries of a directory of /proc (descriptors, threads), and addresses. */
#pragma once

#include <dirent.h>
#include <stdio.h>

static unsigned entries(const char *path)
{
	unsigned count = 0;
	DIR *directory = opendir(path);
	while (directory && readdir(directory))
		count++;
	if (directory)
		closedir(directory);
	return count;
}

static unsigned long address_space_kib(void)
{
	unsigned long size = 0;
	char line[256];
	FILE *file = fopen("/proc/self/status", "r");
	while (file && fgets(line, sizeof line, file))
		sscanf(line, "VmSize: %lu", &size);
	if (file)
		fclose(file);
	return size;
}
