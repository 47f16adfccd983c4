/* Makes a disk slow, or lets it hang, below one folder: preloaded into a process by throttled_disk.py.
 *
 * THROTTLED_FOLDER is the folder, THROTTLED_RATE a file with the bytes in a second: 0 lets reads and
 * writes hang until the file says otherwise. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECE 4096

static const char *folder, *rate_file;

__attribute__((constructor)) static void configure(void) {
    folder = getenv("THROTTLED_FOLDER");
    rate_file = getenv("THROTTLED_RATE");
}

static double rate(void) {
    char text[64] = "";
    int file = syscall(SYS_openat, AT_FDCWD, rate_file, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return -1.0;
    syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    return *text ? atof(text) : -1.0;
}

static void pause_for(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

/* Waits as long as a slow disk needs, and says how many bytes it takes at once. */
static size_t taken(int file, size_t count) {
    char link[64], path[4096];
    if (!folder || !rate_file) return count;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return count;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder))) return count;
    if (count > PIECE) count = PIECE;
    double bytes_per_s;
    while ((bytes_per_s = rate()) == 0.0) pause_for(0.1);
    if (bytes_per_s > 0.0) pause_for(count / bytes_per_s);
    return count;
}

ssize_t write(int file, const void *data, size_t count) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "write");
    return next(file, data, taken(file, count));
}

ssize_t read(int file, void *data, size_t count) {
    static ssize_t (*next)(int, void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "read");
    return next(file, data, taken(file, count));
}
