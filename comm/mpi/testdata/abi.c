/*
 * A stand-in for a library with the ABI of MPI 5 (libmpi_abi.so.0): it has that
 * ABI's handles, constants and statuses, and does everything with MPICH, whose
 * functions it calls by their PMPI names.
 *
 *	cc -shared -fPIC -o libmpi_abi.so.0 abi.c -lmpich
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle; /* of the ABI: pointer-sized */
typedef struct { int source, tag, error, reserved[5]; } status;
typedef struct { int low, high, source, tag, error; } native_status; /* MPICH's */

/* Predefined handles of the ABI, and MPICH's. Others are MPICH's numbers. */
static const struct { uintptr_t abi; unsigned native; } table[] = {
	{0x101, 0x44000000}, {0x142, 0x54000001}, {0x247, 0x4c00010d}, {0x214, 0x4c00080b}, {0x210, 0x4c00040a},
	{0x258, 0x4c00083a}, {0x250, 0x4c000439}, {0x248, 0x4c000238}, {0x240, 0x4c000137}, {0x259, 0x4c00083e},
	{0x251, 0x4c00043d}, {0x249, 0x4c00023c}, {0x241, 0x4c00013b}, {0x238, 0x4c00013f}, {0x21, 0x58000003},
	{0x24, 0x58000004}, {0x22, 0x58000002}, {0x23, 0x58000001}, {0x31, 0x58000007}, {0x30, 0x58000005},
};

static int in(handle h) {
	for (size_t i = 0; i < sizeof table / sizeof *table; i++)
		if (table[i].abi == (uintptr_t)h) return (int)table[i].native;
	return (int)(uintptr_t)h; /* 0, or another small number, is none of MPICH's */
}

static handle out(int native) { return (handle)(uintptr_t)(unsigned)native; }

static const void *buffer(const void *b) { return b == (void *)1 ? (void *)-1 : b; } /* MPI_IN_PLACE */

static int level(int l) { return l >= 4096 ? 3 : l >= 2048 ? 2 : l >= 1024 ? 1 : 0; }
static int level_out(int l) { return l == 3 ? 4096 : l == 2 ? 2048 : l == 1 ? 1024 : 0; }

static void convert(status *s, const native_status *n) {
	memset(s, 0, sizeof *s);
	s->source = n->source, s->tag = n->tag, s->error = n->error, s->reserved[0] = n->low, s->reserved[1] = n->high;
}

#define FORWARD(name, parameters, arguments) \
	int PMPI_##name parameters; \
	int MPI_##name parameters { return PMPI_##name arguments; }

FORWARD(Get_library_version, (char *text, int *n), (text, n))
FORWARD(Initialized, (int *flag), (flag))
FORWARD(Finalized, (int *flag), (flag))
FORWARD(Finalize, (void), ())
FORWARD(Error_string, (int code, char *text, int *n), (code, text, n))

int PMPI_Init_thread(void *, void *, int, int *);
int MPI_Init_thread(void *c, void *v, int required, int *provided) {
	int code = PMPI_Init_thread(c, v, level(required), provided);
	*provided = level_out(*provided);
	return code;
}

int PMPI_Query_thread(int *);
int MPI_Query_thread(int *provided) {
	int code = PMPI_Query_thread(provided);
	*provided = level_out(*provided);
	return code;
}

int PMPI_Error_class(int, int *);
int MPI_Error_class(int code, int *class) {
	int result = PMPI_Error_class(code, class);
	*class = *class == 14 ? 15 : *class == 17 ? 19 : *class; /* ERR_TRUNCATE, ERR_IN_STATUS */
	return result;
}

int PMPI_Abort(int, int);
int MPI_Abort(handle c, int code) { return PMPI_Abort(in(c), code); }
int PMPI_Comm_rank(int, int *);
int MPI_Comm_rank(handle c, int *r) { return PMPI_Comm_rank(in(c), r); }
int PMPI_Comm_size(int, int *);
int MPI_Comm_size(handle c, int *n) { return PMPI_Comm_size(in(c), n); }

int PMPI_Comm_dup(int, int *);
int MPI_Comm_dup(handle c, handle *new) {
	int n = 0, code = PMPI_Comm_dup(in(c), &n);
	*new = out(n);
	return code;
}

int PMPI_Comm_split(int, int, int, int *);
int MPI_Comm_split(handle c, int color, int key, handle *new) {
	int n = 0, code = PMPI_Comm_split(in(c), color, key, &n);
	*new = out(n);
	return code;
}

int PMPI_Comm_free(int *);
int MPI_Comm_free(handle *c) {
	int n = in(*c), code = PMPI_Comm_free(&n);
	*c = out(n);
	return code;
}

int PMPI_Comm_set_errhandler(int, int);
int MPI_Comm_set_errhandler(handle c, handle e) { return PMPI_Comm_set_errhandler(in(c), in(e)); }
int PMPI_Comm_get_attr(int, int, void *, int *);
int MPI_Comm_get_attr(handle c, int key, void *value, int *flag) {
	return PMPI_Comm_get_attr(in(c), key == 501 ? 0x64400001 : key, value, flag); /* MPI_TAG_UB */
}

int PMPI_Reduce_local(const void *, void *, int, int, int);
int MPI_Reduce_local(const void *s, void *r, int count, handle t, handle o) {
	return PMPI_Reduce_local(s, r, count, in(t), in(o));
}

/* Posts that end with a communicator and a request. */
#define POST(name, types, parameters, arguments) \
	int PMPI_##name types; \
	int MPI_##name parameters { \
		int n = 0, code = PMPI_##name arguments; \
		*q = out(n); \
		return code; \
	}

POST(Isend, (const void *, int, int, int, int, int, int *),
	(const void *b, int count, handle t, int dest, int tag, handle c, handle *q), (b, count, in(t), dest, tag, in(c), &n))
POST(Irecv, (void *, int, int, int, int, int, int *),
	(void *b, int count, handle t, int src, int tag, handle c, handle *q), (b, count, in(t), src, tag, in(c), &n))
POST(Ibarrier, (int, int *), (handle c, handle *q), (in(c), &n))
POST(Iallreduce, (const void *, void *, int, int, int, int, int *),
	(const void *s, void *r, int count, handle t, handle o, handle c, handle *q), (buffer(s), r, count, in(t), in(o), in(c), &n))
POST(Ireduce, (const void *, void *, int, int, int, int, int, int *),
	(const void *s, void *r, int count, handle t, handle o, int root, handle c, handle *q), (buffer(s), r, count, in(t), in(o), root, in(c), &n))
POST(Ireduce_scatter_block, (const void *, void *, int, int, int, int, int *),
	(const void *s, void *r, int count, handle t, handle o, handle c, handle *q), (buffer(s), r, count, in(t), in(o), in(c), &n))
POST(Ibcast, (void *, int, int, int, int, int *),
	(void *b, int count, handle t, int root, handle c, handle *q), (b, count, in(t), root, in(c), &n))
POST(Iallgather, (const void *, int, int, void *, int, int, int, int *),
	(const void *s, int sn, handle st, void *r, int rn, handle rt, handle c, handle *q), (buffer(s), sn, in(st), r, rn, in(rt), in(c), &n))
POST(Iallgatherv, (const void *, int, int, void *, const int *, const int *, int, int, int *),
	(const void *s, int sn, handle st, void *r, const int *rn, const int *rd, handle rt, handle c, handle *q),
	(buffer(s), sn, in(st), r, rn, rd, in(rt), in(c), &n))
POST(Ialltoall, (const void *, int, int, void *, int, int, int, int *),
	(const void *s, int sn, handle st, void *r, int rn, handle rt, handle c, handle *q), (buffer(s), sn, in(st), r, rn, in(rt), in(c), &n))
POST(Ialltoallv, (const void *, const int *, const int *, int, void *, const int *, const int *, int, int, int *),
	(const void *s, const int *sn, const int *sd, handle st, void *r, const int *rn, const int *rd, handle rt, handle c, handle *q),
	(buffer(s), sn, sd, in(st), r, rn, rd, in(rt), in(c), &n))
POST(Igather, (const void *, int, int, void *, int, int, int, int, int *),
	(const void *s, int sn, handle st, void *r, int rn, handle rt, int root, handle c, handle *q),
	(buffer(s), sn, in(st), r, rn, in(rt), root, in(c), &n))
POST(Iscatter, (const void *, int, int, void *, int, int, int, int, int *),
	(const void *s, int sn, handle st, void *r, int rn, handle rt, int root, handle c, handle *q),
	(s, sn, in(st), (void *)buffer(r), rn, in(rt), root, in(c), &n))

int PMPI_Recv(void *, int, int, int, int, int, native_status *);
int MPI_Recv(void *b, int count, handle t, int src, int tag, handle c, status *s) {
	native_status n = {0};
	int code = PMPI_Recv(b, count, in(t), src, tag, in(c), &n);
	convert(s, &n);
	return code;
}

int PMPI_Iprobe(int, int, int, int *, native_status *);
int MPI_Iprobe(int src, int tag, handle c, int *flag, status *s) {
	native_status n = {0};
	int code = PMPI_Iprobe(src, tag, in(c), flag, &n);
	convert(s, &n);
	return code;
}

int PMPI_Get_count_c(const native_status *, int, int64_t *);
int MPI_Get_count_c(const status *s, handle t, int64_t *count) {
	native_status n = {s->reserved[0], s->reserved[1], s->source, s->tag, s->error};
	return PMPI_Get_count_c(&n, in(t), count);
}

int PMPI_Cancel(int *);
int MPI_Cancel(handle *q) {
	int n = in(*q);
	return PMPI_Cancel(&n);
}

/* test calls Testall, or, with indices, Testsome. */
int PMPI_Testall(int, int *, int *, native_status *);
int PMPI_Testsome(int, int *, int *, int *, native_status *);
static int test(int count, handle *q, int *flag, int *indices, status *s) {
	int *native = malloc(count * sizeof *native + 1);
	native_status *n = calloc(count + 1, sizeof *n);
	for (int i = 0; i < count; i++) native[i] = in(q[i]);
	int code = indices ? PMPI_Testsome(count, native, flag, indices, n) : PMPI_Testall(count, native, flag, n);
	for (int i = 0; i < count; i++) q[i] = out(native[i]);
	int filled = indices ? *flag : count;
	for (int i = 0; i < filled; i++) convert(&s[i], &n[i]);
	free(native), free(n);
	return code;
}

int MPI_Testall(int count, handle *q, int *flag, status *s) { return test(count, q, flag, NULL, s); }
int MPI_Testsome(int count, handle *q, int *done, int *indices, status *s) { return test(count, q, done, indices, s); }
