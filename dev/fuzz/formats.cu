// Files of --format up to the compiler, which reads the rest of them: their text, and the rows in the compiler's PTX.
#include "../../optim/user.cu"

#include "fuzz.h"

static void format_file(const char* path, FuzzInput input, char* error) {
    char* source = nullptr;
    size_t source_bytes = 0;
    uint64_t sum;
    FILE* file = fopen(path, "wb");
    demand(file != nullptr);
    fwrite(input.bytes, 1, input.count, file);
    fclose(file);
    file = open_memstream(&source, &source_bytes);
    demand(append_file(path, 0, file, &sum, error));
    fclose(file);
    demand(strstr(source, "\"\n") != nullptr);
    free(source);
}

static void ptx_rows(FuzzInput input, char* const* path, char* error) {
    UserFormats* formats = (UserFormats*)calloc(1, sizeof(UserFormats));
    char* text = strndup(input.bytes, input.count);
    bool good = true;
    for (const char* at = strstr(text, row_mark); at && good && formats->count < USER_ROWS;
         at = strstr(at + 1, row_mark)) {
        good = read_row(at, &formats->row[formats->count++]);
    }
    if (good && check_rows(formats, path, 1, error)) free(storage_create(formats));
    free(text), free(formats);
}

void fuzz_formats(FuzzInput input) {
    char error[DATA_ERROR_BYTES], path[64];
    char* const paths[] = {path};
    snprintf(path, sizeof(path), "/dev/shm/nibble_fuzz_%d.cuh", (int)getpid());
    format_file(path, input, error);
    ptx_rows(input, paths, error);
    unlink(path);
}
