// Checksums, files and folders. A function of data/ that fails because of the user's input returns false (NULL, or -1
// for a descriptor) and writes one sentence (the file, what was found, what to do) into `error`; nothing here exits or
// asserts. Reading follows symbolic links, since model caches are made of them. Creating and removing never do: they
// replace or remove the link itself.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include "errors.h"
#include "memory.h"
C_LINKAGE_BEGIN

// Returns FOLDER/NAME, kept as by text_kept.
const char* path_in(const char* folder, const char* name);
const char* path_there(const char* folder, const char* name);  // the same; NULL if nothing has that name
// Returns the folder that holds `path`, "." when none is named, kept as by text_kept.
const char* path_parent(const char* path);
// Returns the absolute path, which the caller frees. "" stays as it is, and so does a path in a folder whose name is
// not UTF-8.
char* path_absolute(const char* path);

#define FILE_READ_MAX (64 << 20)  // the largest file that file_read takes: 64 MiB

// Returns the CRC-32C (Castagnoli) of bytes that follow those with checksum `crc`, 0 at the start. It is the checksum
// of every file of a checkpoint. "123456789" gives 0xE3069283.
uint32_t crc32c(uint32_t crc, const void* bytes, int64_t count);

bool folder_exists(const char* path);
bool file_exists(const char* path);  // a regular file
// Returns whether a name can only mean a file in the same folder: it has no slash and is neither "." nor "..".
bool file_name_plain(const char* name);

// Raises this process's limit of open files to what the system allows: a data set of a thousand shards keeps them open,
// and rank 0 two sockets for each other rank. Returns false if there is no more.
bool more_descriptors(void);
// Opens a regular file for reading and sets its size. Pipes, devices, sockets and folders are refused at once.
int file_open(const char* path, int64_t* bytes, char* error);
// Reads `count` bytes at offset `at`. A file that has become shorter since it was opened is an error.
bool file_read_at(int descriptor, const char* path, void* to, int64_t at, int64_t count, char* error);
// Reads a regular file of at most FILE_READ_MAX bytes, and a NUL byte after them. The caller frees it.
char* file_read(const char* path, int64_t* bytes, char* error);
// Finds the size and CRC-32C of FOLDER/NAME, which it reads in pieces.
bool file_sum(const char* folder, const char* name, uint32_t* crc, int64_t* bytes, char* error);

// Returns whether the disk has room for so many bytes at `path`, which need not exist yet; true if that is unknown.
bool disk_holds(const char* path, int64_t bytes, char* error);
// Creates a file of this name for writing, in place of the file or link that has the name now.
int file_create(const char* path, char* error);
bool file_write_all(int descriptor, const char* path, const void* bytes, int64_t count, char* error);
bool file_sync(int descriptor, const char* path, char* error);
// Writes to `path.tmp`, syncs it, renames it to `path`, and syncs the folder.
bool file_write(const char* path, const void* bytes, int64_t count, char* error);
// Opens a log for appending, or creates it. Cuts off a half-written last line.
FILE* log_open(const char* path, char* error);

// Makes a folder and its parents. An existing folder is ok, an existing file of that name is an error.
bool folder_make(const char* path, char* error);
// Makes an empty folder in an existing one, and replaces whatever has its name.
bool folder_new(const char* path, char* error);
bool folder_sync(const char* path, char* error);
// Removes a folder with all that is in it, or the file or link of that name; follows no links. True if there is none.
bool folder_remove(const char* path, char* error);

C_LINKAGE_END
