// Does memory read as zeros after MADV_DONTNEED, if another thread of the process returns from a
// system call meanwhile?  usage: stale-pages ROUNDS; exit code 1 if not.
//
// The kernel unmaps at most 9,698 pages, then continues with the next ones, in general in the
// middle of a page table.  So only pages around that limit are read.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16384, FROM = 9600, TO = 9698 + 512 };

static void *nap(void *unused) {
  (void)unused;
  for (;;) usleep(random() % 20000);
  return NULL;
}

int main(int argc, char **argv) {
  int rounds = argc > 1 ? atoi(argv[1]) : 100, bad = 0;
  pthread_t t;
  pthread_create(&t, NULL, nap, NULL);
  volatile char *p = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (int round = 0; round < rounds; round++) {
    int stale = 0, last = 0;
    madvise((void *)p, (size_t)PAGES * PAGE, MADV_POPULATE_WRITE);
    for (int i = FROM; i < TO; i++) p[(size_t)i * PAGE] = 1;
    madvise((void *)p, (size_t)PAGES * PAGE, MADV_DONTNEED);
    for (int i = FROM; i < TO; i++)
      if (p[(size_t)i * PAGE]) stale++, last = i;
    if (stale && bad++ < 5)
      printf("round %d: %d pages keep their bytes, up to page %d\n", round, stale, last);
    fflush(stdout);
  }
  printf("%d of %d rounds are bad\n", bad, rounds);
  return bad != 0;
}
