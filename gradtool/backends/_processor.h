/* Whether the compiler can build for several levels of a processor, and ask at run time which level it runs on. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HAS_LEVELS
#endif
