// See user.h. The files are compiled together to PTX, without a kernel, in 0.1 s; from the cache it takes no time.
#include "user.h"

#include <ctype.h>

#include "../data/files.h"
#include "jit.h"
#include "names.h"
#include "override.h"
#include "storage.h"

// PTX has the rows as `.global .align 4 .b8 optim_user_row_0_12[888] = {0, 0, ...};`. Zeros at the end may be left out,
// and a compiler may add text before or after the name.
static const char row_mark[] = "optim_user_row_";

// Returns true if a comment ends at `at`; `line`: it began with //.
static bool ends_comment(const char* at, bool line) {
    return line ? *at == '\n' : at[0] == '*' && at[1] == '/';
}

// Removes comments and redundant white space from a C++ text, in place, since a file's checksum ignores them. A comment
// becomes a space. Consecutive white space becomes one space, or one line end if it contains one; white space at both
// ends of the text is removed. Returns the new length.
static int64_t squeeze(char* text) {
    char *to = text, space = 0;
    for (const char* at = text; *at;) {
        if (at[0] == '/' && (at[1] == '/' || at[1] == '*')) {
            bool line = at[1] == '/';
            for (at += 2; *at && !ends_comment(at, line);) at++;
            if (*at && !line) at += 2;
            space = space ? space : ' ';
        } else if (isspace((unsigned char)*at)) {
            space = *at++ == '\n' || space == '\n' ? '\n' : ' ';
        } else {
            char quote = *at == '"' || *at == '\'' ? *at : 0;
            if (space && to != text) *to++ = space;
            space = 0;
            *to++ = *at++;
            for (bool open = quote != 0; open && *at; at++) {
                open = *at != quote && *at != '\n';
                *to++ = *at;
                if (*at == '\\' && at[1]) *to++ = *++at;
            }
        }
    }
    return to - text;
}

// Appends a file's text to the source, with a #line for the compiler's messages, and sets *sum to its checksum. Returns
// false with a sentence if the file cannot be read.
static bool append_file(const char* path, int index, FILE* to, uint64_t* sum, char* error) {
    char reason[DATA_ERROR_BYTES];
    int64_t length = 0;
    char* text = file_read(path, &length, reason);
    if (!text) return data_error(error, "--format: %s; type the path of a format's file", reason);
    fprintf(to, "\n#undef USER_FILE\n#define USER_FILE %d\n#line 1 \"", index);
    for (const char* c = path; *c; c++) fprintf(to, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    fprintf(to, "\"\n");
    fwrite(text, 1, (size_t)length, to);
    fputc('\n', to);
    *sum = text_hash(text, squeeze(text));
    free(text);
    return true;
}

// Reads the initialiser at `text`. Returns false if it is not in the expected form.
static bool read_row(const char* text, UserRow* row) {
    const char* at = text;
    char* end;
    unsigned char* to = (unsigned char*)row;
    memset(row, 0, sizeof(*row));
    while (isalnum((unsigned char)*at) || *at == '_') at++;
    if (*at != '[' || strtoul(at + 1, &end, 10) != sizeof(*row) || strncmp(end, "] = {", 5) != 0) return false;
    at = end + 5;
    for (size_t i = 0; i < sizeof(*row); i++) {
        unsigned long byte = strtoul(at, &end, 10);
        if (end == at || byte > 255) return false;
        to[i] = (unsigned char)byte;
        at = end;
        while (*at == ' ' || *at == ',') at++;
        if (*at == '}') return true;
    }
    return false;
}

static bool is_name(const char* name) {
    for (const char* c = name; *c; c++) {
        if (!isalnum((unsigned char)*c) && !strchr("_-+./:@", *c)) return false;
    }
    return *name != 0;
}

static bool is_power(int number) {
    return number > 0 && (number & (number - 1)) == 0;
}

// Checks the properties of a row on which the rest of the optimizer relies.
static bool row_check(const UserRow* row, const char* path, char* error) {
    if (row->too_long) {
        return data_error(error,
                          "--format: %s has a row whose name, note or type is longer than %zu, %zu or %zu characters",
                          path, sizeof(row->name) - 1, sizeof(row->note) - 1, sizeof(row->type) - 1);
    }
    if (!is_name(row->name)) {
        return data_error(error, "--format: %s names a format \"%s\"; take letters, digits and any of _-+./:@", path,
                          row->name);
    }
    for (int i = 0; i < 3; i++) {
        int bit = row->bits[i];
        bool known = i > 0 && bit == 0 ? true : bit == 4 || bit == 8 || bit == 16 || bit == 32;
        bool fits = known && (bit == 0 || (is_power(row->run[i]) && row->run[i] <= TILE_ELEMENTS));
        if (!fits || (i > 0 && bit == 4)) {
            return data_error(error,
                              "--format: %s: array %d of \"%s\" has %d bits every %d elements; take 4 (codes only), 8, "
                              "16 or 32 every 1, 2, 4, ... or %lld",
                              path, i, row->name, bit, row->run[i], (long long)TILE_ELEMENTS);
        }
    }
    // Two such tables and the stages of a group of threads fit into the shared memory of every supported GPU.
    const int max = 44 * 1024;
    if (row->table_bytes > max) {
        return data_error(error, "--format: %s: the table of \"%s\" has %d bytes and may have %d", path, row->name,
                          row->table_bytes, max);
    }
    return true;
}

// Compiles the source, and reads the rows from its PTX.
static bool compile_rows(UserFormats* formats, const char* paths, char* error) {
    char architecture[32], *log = (char*)memory_zero(1, DATA_ERROR_BYTES);
    JitImage image;
    // This asks for the newest PTX that the library knows, since the rows do not depend on the device.
    bool good = jit_architecture(INT32_MAX, architecture, sizeof(architecture), log) &&
                jit_get("", architecture, &image, log, formats->source);
    if (!good) snprintf(error, DATA_ERROR_BYTES, "--format %s: %s", paths, log);  // keeps the lines of the log
    free(log);
    if (!good) return false;
    char* text = text_part(image.image, (size_t)image.image_bytes);
    jit_free(&image);
    for (const char* at = strstr(text, row_mark); at && good; at = strstr(at + 1, row_mark)) {
        if (formats->count == USER_ROWS) {
            good = data_error(error, "--format: %s hold more than %d formats", paths, USER_ROWS);
        } else if (!read_row(at, &formats->row[formats->count++])) {
            good = data_error(error, "--format: this libnvrtc writes PTX in which formats are not found: %.80s", at);
        }
    }
    free(text);
    return good;
}

// Checks that every file has a row, and that every row is valid and has a new name.
static bool check_rows(const UserFormats* formats, char* const* path, int files, char* error) {
    for (int file = 0; file < files; file++) {
        bool any = false;
        for (int i = 0; i < formats->count; i++) any = any || formats->row[i].file == file;
        if (any) continue;
        return data_error(error,
                          "--format: %s names no format; add a line such as OPTIM_FORMAT(\"my8/64\", \"when to use "
                          "it\", Blocks<My8, 64, ScaleFp32, NEAREST>)",
                          path[file]);
    }
    for (int i = 0; i < formats->count; i++) {
        const UserRow* row = &formats->row[i];
        if (!row_check(row, path[row->file], error)) return false;
        if (optim_name_is_taken(row->name)) {
            return data_error(error, "--format: %s names a format \"%s\", which is built in; take another name",
                              path[row->file], row->name);
        }
        for (int j = 0; j < i; j++) {
            if (strcmp(row->name, formats->row[j].name) != 0) continue;
            return data_error(error, "--format: %s names a format \"%s\", and so does %s; take another name",
                              path[row->file], row->name, path[formats->row[j].file]);
        }
    }
    return true;
}

// Returns rows like those of the built-in formats, but without functions; the caller frees them.
static FormatRow* storage_create(const UserFormats* formats) {
    FormatRow* rows = (FormatRow*)memory_zero((size_t)formats->count, sizeof(FormatRow));
    for (int i = 0; i < formats->count; i++) {
        const UserRow* from = &formats->row[i];
        FormatRow* row = &rows[i];
        row->name = from->name, row->note = from->note, row->type = from->type, row->source = formats->source;
        for (int k = 0; k < 3; k++) {
            row->stream[k] = {from->suffix[k], from->dtype[k],     from->bits[k], from->bits[k] ? from->run[k] : 1,
                              false,           (Span)from->span[k]};
        }
        row->table_bytes = from->table_bytes;
        row->has_sign = from->has_sign;
    }
    return rows;
}

bool user_formats_open(const char* paths, UserFormats** formats, char* error) {
    char *list = text_copy(paths), *path[USER_FILES], *rest = nullptr;
    size_t source_bytes = 0;
    int files = 0;
    *formats = (UserFormats*)memory_zero(1, sizeof(UserFormats));
    FILE* source = text_stream(&(*formats)->source, &source_bytes);
    bool good = true;
    for (char* one = strtok_r(list, ",", &rest); one && good; one = strtok_r(nullptr, ",", &rest)) {
        if (files == USER_FILES) {
            good = data_error(error, "--format: %s are more than %d files", paths, USER_FILES);
        } else {
            path[files] = one;
            uint64_t* sum = (*formats)->sum;
            good = append_file(one, files, source, &sum[files], error);
            for (int i = 0; good && i < files; i++) {
                if (sum[i] != sum[files]) continue;
                good = data_error(error, "--format: %s holds the same as %s; type one of them alone", one, path[i]);
            }
            files++;
        }
    }
    fclose(source);
    good = good && compile_rows(*formats, paths, error) && check_rows(*formats, path, files, error);
    free(list);
    if (good) (*formats)->storage = storage_create(*formats);
    if (good) return true;
    user_formats_free(*formats);
    *formats = nullptr;
    return false;
}

void user_formats_free(UserFormats* formats) {
    if (!formats) return;
    free(formats->source), free(formats->storage), free(formats);
}

void user_sums(const OptimConfig* config, char* text, size_t bytes) {
    const UserFormats* formats = config->user_formats;
    Override overrides[OVERRIDES];
    char ignored[DATA_ERROR_BYTES];
    int count = 0;
    text[0] = 0;
    if (!formats || !overrides_parse(config->overrides, overrides, &count, ignored)) return;
    for (int i = -1; i < count; i++) {
        for (const char* name : {i < 0 ? config->m : overrides[i].m, i < 0 ? config->v : overrides[i].v}) {
            const UserRow* row = find_row(Table<UserRow>{formats->row, formats->count}, name);
            char entry[64];
            if (!row) continue;
            snprintf(entry, sizeof(entry), "%s=%016llx", row->name, (unsigned long long)formats->sum[row->file]);
            if (strstr(text, entry)) continue;
            size_t used = strlen(text);
            snprintf(text + used, bytes - used, "%s%s", used ? " " : "", entry);
        }
    }
}

void user_table_fill(const Device* dev, const char* type, const char* source, void* table) {
    char expression[640];
    JitKernel kernel;
    snprintf(expression, sizeof(expression), "optim_fill_kernel<%s>", type);
    jit_kernel(dev->compute, expression, source, &kernel);
    void* arguments[] = {&table};
    jit_launch(&kernel, 1, 1, 0, arguments, dev->stream);
}

void optim_formats_possible(const Device* dev, const char* formats) {
    if (dev->gpu || !*formats) return;
    user_error(
        "--format %s: a format of your own is compiled for a GPU, and this run is on the CPU; type --format '', with a "
        "built-in one for --m and --v (--list-formats names them), or run on a GPU",
        formats);
}
