// Preloaded into a process, kills it at its n-th change of what lies in a folder: SIGKILL, from within.
//
// A change is a call that opens a file to write, writes, syncs, cuts, renames, makes or removes. A write counts twice:
// the process is killed before it, or after half of it. Calls of all threads count, also those of compiled libraries.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MOST_FILES 256

static char folder[PATH_MAX];
static atomic_int is_on, left;
static int loses_unsynced;
static struct { dev_t device; ino_t inode; int handle; } unsynced[MOST_FILES];
static int num_unsynced;

// Begin to count. With `loses`, what was written and not synced is lost, as when a machine loses its power.
void kill_at_change(int number, const char *where, int loses) {
    snprintf(folder, sizeof folder, "%s", where);
    left = number;
    loses_unsynced = loses;
    is_on = 1;
}

void count_no_more(void) { left = 0; }

static int is_below(const char *path) { return strncmp(path, folder, strlen(folder)) == 0; }

static int is_open_below(int handle, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static void die(const char *what, const char *path) {
    if (loses_unsynced)
        for (int i = 0; i < num_unsynced; i++)
            if (unsynced[i].handle >= 0 && REAL(ftruncate)(unsynced[i].handle, 0)) perror("ftruncate");
    dprintf(2, "killed at %s %s\n", what, path);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

// Count a change that is about to be made; one thread dies, others may go on until the signal has come.
static void count(const char *what, const char *path) {
    if (atomic_fetch_sub(&left, 1) == 1) die(what, path);
}

static void count_at(const char *what, int at, const char *path) {
    char parent[PATH_MAX];
    if (is_on && (path[0] == '/' ? is_below(path) : at != AT_FDCWD && is_open_below(at, parent))) count(what, path);
}

static int find(int handle, struct stat *about) {
    fstat(handle, about);
    for (int i = 0; i < num_unsynced; i++)
        if (unsynced[i].device == about->st_dev && unsynced[i].inode == about->st_ino) return i;
    return -1;
}

static void note_write(int handle) {
    struct stat about;
    int at = find(handle, &about);
    if (at < 0 && num_unsynced < MOST_FILES) {
        at = num_unsynced++;
        unsynced[at].device = about.st_dev, unsynced[at].inode = about.st_ino, unsynced[at].handle = -1;
    }
    if (at >= 0 && unsynced[at].handle < 0) unsynced[at].handle = dup(handle);
}

static void note_sync(int handle) {
    struct stat about;
    int at = find(handle, &about);
    if (at >= 0 && unsynced[at].handle >= 0) {
        close(unsynced[at].handle);
        unsynced[at].handle = -1;
    }
}

ssize_t write(int handle, const void *data, size_t size) {
    char path[PATH_MAX];
    if (!is_on || !is_open_below(handle, path)) return REAL(write)(handle, data, size);
    count("write of", path);
    note_write(handle);
    if (left == 1 && REAL(write)(handle, data, size / 2) < 0) perror("write");
    count("half of a write of", path);
    return REAL(write)(handle, data, size);
}

#define OPEN(name, first_declared, first, at)                                                    \
    int name(first_declared const char *path, int flags, ...) {                                  \
        va_list rest;                                                                             \
        va_start(rest, flags);                                                                    \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                   \
        va_end(rest);                                                                             \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) count_at("opening", at, path);       \
        return REAL(name)(first path, flags, mode);                                               \
    }
#define COMMA ,
OPEN(open, , , AT_FDCWD)
OPEN(open64, , , AT_FDCWD)
OPEN(openat, int folder_at COMMA, folder_at COMMA, folder_at)
OPEN(openat64, int folder_at COMMA, folder_at COMMA, folder_at)

// In the folder the disk itself is not waited for: only `loses` tells what was synced from what was not.
#define SYNC(name)                                                             \
    int name(int handle) {                                                     \
        char path[PATH_MAX];                                                   \
        if (!is_on || !is_open_below(handle, path)) return REAL(name)(handle); \
        count(#name, path);                                                    \
        note_sync(handle);                                                     \
        return 0;                                                              \
    }
SYNC(fsync)
SYNC(fdatasync)

int ftruncate(int handle, off_t size) {
    char path[PATH_MAX];
    if (is_on && is_open_below(handle, path)) count("ftruncate", path);
    return REAL(ftruncate)(handle, size);
}

int rename(const char *old, const char *new) {
    count_at("rename", AT_FDCWD, old);
    return REAL(rename)(old, new);
}

int renameat(int old_at, const char *old, int new_at, const char *new) {
    count_at("rename", old_at, old);
    return REAL(renameat)(old_at, old, new_at, new);
}

int mkdir(const char *path, mode_t mode) {
    count_at("mkdir", AT_FDCWD, path);
    return REAL(mkdir)(path, mode);
}

int unlink(const char *path) {
    count_at("unlink", AT_FDCWD, path);
    return REAL(unlink)(path);
}

int unlinkat(int at, const char *path, int flags) {
    count_at("unlink", at, path);
    return REAL(unlinkat)(at, path, flags);
}

int rmdir(const char *path) {
    count_at("rmdir", AT_FDCWD, path);
    return REAL(rmdir)(path);
}
