// Objects of a pool <-> rows of a paged KV cache, on the card: one source for the GPU (NVRTC makes the PTX text
// of objects_ptx.hpp from it, `make kernels`) and for the tests' software device, which compiles it as C++.
//
// An object is some rows of the KV cache, one after another: of one block, and one column (a range of heads).
// The table of rows lies on the device once; a job names objects only.
//
//     rows[begins[c] .. begins[c + 1])   the rows of column c: where each lies in block 0, how far it is to
//                                        the same row of the next block, its length, its place in the object
//     objects[i]                         place in the staging buffer, block, column
//
// Small pieces of transfers have the same form (device/piece_plan.hpp): each four are an object of their own.
//
// `split` warps share an object. A warp takes 4 rows at a time, and a lane 1 to 16 bytes of each: as many as the
// 8 addresses are aligned to (rows of 584 bytes: 8). All 4 are loaded before the first is stored: a row of 512
// bytes alone would leave the warp waiting for memory most of the time.
//
// load: 1 staging -> KV, 0 KV -> staging. No two rows of a job overlap where it writes.
#ifdef __CUDACC_RTC__
#define KERNEL extern "C" __global__ __launch_bounds__(1024)
#define DEVICE __device__ __forceinline__
#define ROLLED _Pragma("unroll 1")
#define ALIGNED(bytes) __align__(bytes)
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define AT(type, address) (*(type*)(address))
#endif

struct Row {
    unsigned long long address, stride;
    unsigned length, offset;
};
struct Object {
    unsigned long long staged;
    unsigned block, column;
};
struct ALIGNED(16) Word16 {
    unsigned x, y, z, w;
};

struct Move {
    unsigned long long to[4], from[4];
    unsigned length[4];
};

template <class Word>
DEVICE void copy_rows(const Move& move, unsigned lane) {
    const unsigned size = sizeof(Word);
    unsigned longest = 0;
    for (unsigned k = 0; k < 4; ++k) longest = move.length[k] > longest ? move.length[k] : longest;
    ROLLED for (unsigned i = lane * size; i + size <= longest; i += 32 * size) {
        Word word[4];
        for (unsigned k = 0; k < 4; ++k) {
            if (i + size <= move.length[k]) word[k] = AT(const Word, move.from[k] + i);
        }
        for (unsigned k = 0; k < 4; ++k) {
            if (i + size <= move.length[k]) AT(Word, move.to[k] + i) = word[k];
        }
    }
    if constexpr (sizeof(Word) > 1) {
        for (unsigned k = 0; k < 4; ++k) {  // what is left of each row: fewer bytes than a word
            const unsigned i = move.length[k] / size * size + lane;
            if (i < move.length[k]) {
                AT(unsigned char, move.to[k] + i) = AT(const unsigned char, move.from[k] + i);
            }
        }
    }
}

KERNEL void moonpool_objects(const Row* rows, const unsigned* begins, const Object* objects, unsigned count,
                             unsigned split, unsigned long long stage, unsigned load) {
    const unsigned warp = (BLOCK * THREADS + THREAD) / 32, warps = BLOCKS * THREADS / 32, lane = THREAD % 32;
    for (unsigned w = warp; w < count * split; w += warps) {
        const Object object = AT(const Object, objects + w / split);
        const unsigned end = AT(const unsigned, begins + object.column + 1);
        const unsigned begin = AT(const unsigned, begins + object.column);
        ROLLED for (unsigned r = begin + 4 * (w % split); r < end; r += 4 * split) {
            Move move;
            unsigned long long low = 0;
            for (unsigned k = 0; k < 4; ++k) {
                if (r + k >= end) {
                    move.to[k] = move.from[k] = move.length[k] = 0;
                    continue;
                }
                const Row row = AT(const Row, rows + r + k);
                const unsigned long long kv = row.address + object.block * row.stride;
                const unsigned long long staged = stage + object.staged + row.offset;
                move.to[k] = load ? kv : staged;
                move.from[k] = load ? staged : kv;
                move.length[k] = row.length;
                low |= kv | staged;
            }
            if ((low & 15) == 0) {
                copy_rows<Word16>(move, lane);
            } else if ((low & 7) == 0) {
                copy_rows<unsigned long long>(move, lane);
            } else if ((low & 3) == 0) {
                copy_rows<unsigned>(move, lane);
            } else {
                copy_rows<unsigned char>(move, lane);
            }
        }
    }
}
