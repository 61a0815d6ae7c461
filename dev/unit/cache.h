// What the tests of the run-time compiler and those that compare its kernels share: a cache of their own.
#pragma once
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// A folder of its own for the cache of compiled kernels, named by NIBBLE_CACHE while the test runs.
struct CacheFolder {
    char path[64];
    char* saved;
};

inline CacheFolder cache_enter() {
    CacheFolder folder = {"/tmp/nibble-test-XXXXXX", nullptr};
    const char* saved = getenv("NIBBLE_CACHE");
    if (saved) folder.saved = strdup(saved);
    if (!mkdtemp(folder.path)) printf("    mkdtemp failed\n"), exit(1);
    setenv("NIBBLE_CACHE", folder.path, 1);
    return folder;
}

inline int folder_files(const char* path, bool remove_them) {
    DIR* folder = opendir(path);
    int count = 0;
    if (!folder) return -1;
    while (struct dirent* entry = readdir(folder)) {
        if (entry->d_name[0] == '.') continue;
        char file[512];
        snprintf(file, sizeof(file), "%s/%s", path, entry->d_name);
        if (remove_them) unlink(file);
        count++;
    }
    closedir(folder);
    return count;
}

inline void cache_leave(CacheFolder* folder) {
    folder_files(folder->path, true);
    rmdir(folder->path);
    if (folder->saved) {
        setenv("NIBBLE_CACHE", folder->saved, 1);
    } else {
        unsetenv("NIBBLE_CACHE");
    }
    free(folder->saved);
}
