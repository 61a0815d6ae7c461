// JSON (RFC 8259): text to a tree, and back.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// This is a tree. Numbers keep their text so that 64-bit integers are exact.
typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonKind;
typedef struct Json Json;
struct Json {
    JsonKind kind;
    char* key;   // in an object; UTF-8, unescaped
    char* text;  // of a string (UTF-8, unescaped; length in text_bytes, may hold NUL) or a number
    int64_t text_bytes;
    double number;  // also 0 / 1 for JSON_BOOL
    Json* child;    // first element
    Json* next;     // next sibling
};
// Parsing is strict and takes at most 256 levels; the caller frees the tree.
Json* json_parse(const char* text, int64_t bytes, const char* what, char* error);  // `what` names the file in the error
Json* json_read(const char* path, char* error);                                    // of a file
void json_free(Json* json);
// JSON_SCOPED Json* json = json_read(...); is freed where its scope ends.
#define JSON_SCOPED __attribute__((cleanup(json_drop)))
void json_drop(Json** json);
// Returns the member of this name, the last one if it comes twice, as in Python; NULL when it is absent.
const Json* json_get(const Json* object, const char* key);
// These return a member's value; `otherwise` when it is absent or of another kind, or no integer of 64 bits.
double json_number(const Json* object, const char* key, double otherwise);
int64_t json_int(const Json* object, const char* key, int64_t otherwise);
const char* json_string(const Json* object, const char* key, const char* otherwise);
void json_write(FILE* file, const Json* json);         // the whole tree; numbers as their text
char* json_text(const Json* json);                     // the same as a text, which the caller frees
void json_write_string(FILE* file, const char* text);  // quoted and escaped; bytes that are no UTF-8 become U+FFFD
void json_write_number(FILE* file, double value);      // shortest decimal that reads back; non-finite as null
// These write a member of an object, after `before` ("{" or ", ", say).
void json_write_text_member(FILE* file, const char* before, const char* name, const char* text);
void json_write_number_member(FILE* file, const char* before, const char* name, double value);

C_LINKAGE_END
