use super::rows::Addresses;
use super::*;
use crate::bus::{BusFault, Space};
use crate::testing::{DATA, Machine, execute, pattern};
use crate::wave::{LANES, Row, reg};

/// A row that is computed from the lane's number.
fn row(of: impl Fn(u32) -> u32) -> Row {
    Row(core::array::from_fn(|lane| of(lane as u32)))
}

struct Fixture {
    wave: Wave,
    lds: Lds,
    machine: Machine,
}

impl Fixture {
    /// s[0:1] is the data's address, v1 is 4 times the lane.
    fn new() -> Self {
        let mut wave = Wave::new();
        wave.set_sgpr64(0, DATA);
        let mut new = Self { wave, lds: Lds::new(8192), machine: Machine::new(&[]) };
        new.set(1, |lane| 4 * lane);
        new
    }

    fn set(&mut self, vgpr: u8, of: impl Fn(u32) -> u32) {
        *self.wave.row_mut(vgpr).unwrap() = row(of);
    }

    /// v[16:17] is a 64-bit address for each lane.
    fn set_addresses(&mut self, of: impl Fn(u64) -> u64) {
        let addresses: Addresses = core::array::from_fn(|lane| of(lane as u64));
        self.set(16, |lane| addresses[lane as usize] as u32);
        self.set(17, |lane| (addresses[lane as usize] >> 32) as u32);
    }

    fn run(&mut self, words: &[u32]) {
        self.try_run(words).unwrap();
    }

    fn try_run(&mut self, words: &[u32]) -> Result<(), Stop> {
        execute(&mut self.wave, words, &mut self.lds, &mut self.machine)
    }

    fn lane(&self, vgpr: u8, lane: usize) -> u32 {
        self.wave.row(vgpr).lane(lane)
    }

    /// Each word of LDS holds its own index.
    fn number_lds(&mut self) {
        let words: Vec<u32> = (0..2048).collect();
        self.lds.store_words(0, &words).unwrap();
    }

    fn lds_word(&mut self, index: u64) -> u32 {
        let mut word = [0];
        self.lds.load_words(4 * index, &mut word).unwrap();
        word[0]
    }
}

const LOAD_DWORD: [u32; 2] = [0xdc50_0000, 0x0f00_0010]; // flat_load_dword v15, v[16:17]
const STORE_DWORD: [u32; 2] = [0xdc70_0000, 0x0000_1210]; // flat_store_dword v[16:17], v18

// C77 of the project's list of real-world cases: offsets of the 64-bit pairs count 8 bytes, those of st64 512.
#[test]
fn pairs_of_lds_accesses_have_the_right_stride() {
    let mut fixture = Fixture::new();
    fixture.number_lds();
    fixture.set(1, |_| 8);
    fixture.run(&[0xd8ee_0501, 0x0200_0001]); // ds_read2_b64 v[2:5], v1 offset0:1 offset1:5
    assert_eq!([2, 3, 4, 5].map(|vgpr| fixture.lane(vgpr, 63)), [4, 5, 12, 13]);
    fixture.run(&[0xd8f0_0201, 0x0600_0001]); // ds_read2st64_b64 v[6:9], v1 offset0:1 offset1:2
    assert_eq!([6, 7, 8, 9].map(|vgpr| fixture.lane(vgpr, 0)), [130, 131, 258, 259]);
    fixture.set(1, |lane| 16 * lane);
    fixture.set(10, |lane| 1000 + lane);
    fixture.set(11, |lane| 2000 + lane);
    fixture.run(&[0xd81c_0302, 0x000b_0a01]); // ds_write2_b32 v1, v10, v11 offset0:2 offset1:3
    assert_eq!([4, 5, 6, 7].map(|index| fixture.lds_word(index)), [4, 5, 1001, 2001]);
}

#[test]
fn lanes_change_lds_one_after_the_other() {
    let mut fixture = Fixture::new();
    fixture.set(1, |_| 0);
    fixture.set(10, |lane| lane);
    fixture.wave.set_exec(0b1111);
    fixture.run(&[0xd840_0010, 0x0c00_0a01]); // ds_add_rtn_u32 v12, v1, v10 offset:16
    assert_eq!(fixture.lds_word(4), 6);
    assert_eq!([0, 1, 2, 3, 4].map(|lane| fixture.lane(12, lane)), [0, 0, 1, 3, 0]);
    // The comparand is the first operand: v10; the new value is in v11.
    fixture.set(10, |lane| if lane == 2 { 0 } else { 99 });
    fixture.set(11, |lane| 70 + lane);
    fixture.run(&[0xd860_0014, 0x0d0b_0a01]); // ds_cmpst_rtn_b32 v13, v1, v10, v11 offset:20
    assert_eq!(fixture.lds_word(5), 72);
    assert_eq!(fixture.lane(13, 3), 72);
}

#[test]
fn lds_ends_where_it_ends() {
    let mut fixture = Fixture::new();
    fixture.number_lds();
    fixture.set(1, |lane| 8192 - 128 + 4 * lane);
    fixture.run(&[0xd86c_0000, 0x0300_0001]); // ds_read_b32 v3, v1
    assert_eq!([0, 31, 32, 63].map(|lane| fixture.lane(3, lane)), [2016, 2047, 0, 0]);
    // An address and an offset wrap in 32 bits.
    fixture.set(1, |_| (-4i32) as u32);
    fixture.run(&[0xd86c_0008, 0x0300_0001]); // ds_read_b32 v3, v1 offset:8
    assert_eq!(fixture.lane(3, 0), 1);
}

#[test]
fn half_a_register_is_loaded_and_the_other_kept() {
    let mut fixture = Fixture::new();
    fixture.lds.store_words(0, &[0x1234_80ff]).unwrap();
    fixture.set(1, |_| 0);
    fixture.set(14, |_| 0xaaaa_bbbb);
    fixture.run(&[0xd8ae_0001, 0x0e00_0001]); // ds_read_u8_d16_hi v14, v1 offset:1
    assert_eq!(fixture.lane(14, 5), 0x0080_bbbb);
}

// C76: a generic address is LDS, private or global memory by its high half.
#[test]
fn flat_addresses_find_their_memory() {
    let mut fixture = Fixture::new();
    fixture.number_lds();
    fixture.wave.set_sgpr64(reg::FLAT_SCRATCH, DATA + 0x4000);
    let of = |lane: u64| match lane % 3 {
        0 => DATA + 4 * lane,
        1 => (1 << 48) + 4 * lane,
        _ => (2 << 48) + 8,
    };
    fixture.set_addresses(of);
    fixture.run(&LOAD_DWORD);
    for lane in 0..64u32 {
        // Private memory: words of 64 lanes next to each other.
        let expected = match lane % 3 {
            0 => pattern(4 * lane),
            1 => lane,
            _ => pattern(0x4000 + 2 * 256 + 4 * lane),
        };
        assert_eq!(fixture.lane(15, lane as usize), expected, "lane {lane}");
    }
    fixture.set(18, |lane| 0xcc00_0000 | lane);
    fixture.run(&STORE_DWORD);
    assert_eq!(fixture.machine.word(DATA + 4 * 63), 0xcc00_003f);
    assert_eq!(fixture.lds_word(1), 0xcc00_0001);
    assert_eq!(fixture.machine.word(DATA + 0x4000 + 512 + 4 * 2), 0xcc00_0002);
    fixture.run(&[0xdd09_0000, 0x1600_1210]); // flat_atomic_add v22, v[16:17], v18 glc
    assert_eq!(fixture.lane(22, 4), 0xcc00_0004);
    assert_eq!(fixture.lds_word(4), 0x9800_0008);
}

#[test]
fn private_memory_is_swizzled_by_words() {
    let mut fixture = Fixture::new();
    fixture.wave.set_sgpr64(reg::FLAT_SCRATCH, DATA);
    fixture.set(1, |_| 4);
    fixture.run(&[0xdc50_4004, 0x227f_0001]); // scratch_load_dword v34, v1, off offset:4
    assert_eq!(fixture.lane(34, 3), pattern(2 * 256 + 12));
    // Two bytes over the end of a word: s4 + 3.
    fixture.wave.set_sgpr(4, 0);
    fixture.set(18, |_| 0xbeef);
    fixture.run(&[0xdc68_4003, 0x0004_1200]); // scratch_store_short off, v18, s4 offset:3
    let byte = |fixture: &mut Fixture, offset: u64| {
        fixture.machine.word(DATA + offset / 4 * 4) >> (8 * (offset % 4)) & 0xff
    };
    assert_eq!(byte(&mut fixture, 4 * 5 + 3), 0xef);
    assert_eq!(byte(&mut fixture, 256 + 4 * 5), 0xbe);
    // Two words from an address that is not aligned, by a generic pointer.
    fixture.set_addresses(|_| (2 << 48) + 2);
    fixture.run(&[0xdc54_0000, 0x1400_0010]); // flat_load_dwordx2 v[20:21], v[16:17]
    let at = |word: u32, byte: u32| pattern(256 * word + 4 * 7) >> (8 * byte) & 0xff;
    // Lane 7: word 0 has 0xef in byte 3, word 1 0xbe in byte 0.
    assert_eq!(fixture.lane(20, 7), at(0, 2) | 0xef << 8 | 0xbe << 16 | at(1, 1) << 24);
    assert_eq!(fixture.lane(21, 7), at(1, 2) | at(1, 3) << 8 | at(2, 0) << 16 | at(2, 1) << 24);
}

#[test]
fn an_address_in_no_aperture_stops_the_wave() {
    let mut fixture = Fixture::new();
    fixture.set_addresses(|lane| if lane == 5 { 0xdead << 48 } else { DATA });
    assert_eq!(fixture.try_run(&LOAD_DWORD), Err(Stop::Aperture { va: 0xdead << 48 }));
    // LDS is not for GLOBAL.
    fixture.set_addresses(|_| 1 << 48);
    let global = [0xdd85_8000, 0x187f_1a10]; // global_atomic_cmpswap_x2 v[24:25], v[16:17], v[26:29], off glc
    assert_eq!(fixture.try_run(&global), Err(Stop::Aperture { va: 1 << 48 }));
    // A lane that is off does no harm.
    fixture.set_addresses(|lane| if lane == 5 { 0xdead << 48 } else { DATA });
    fixture.wave.set_exec(!(1 << 5));
    fixture.run(&LOAD_DWORD);
    fixture.wave.set_exec(0);
    fixture.run(&global);
}

#[test]
fn a_fault_names_the_lanes_address() {
    let mut fixture = Fixture::new();
    fixture.set_addresses(|lane| if lane == 9 { 0x1000 } else { DATA + 4 * lane });
    fixture.set(18, |_| 7);
    let fault = BusFault::Page { va: 0x1000, write: true };
    assert_eq!(fixture.try_run(&STORE_DWORD), Err(Stop::Fault(fault)));
    fixture.set_addresses(|_| DATA + 4);
    let global = [0xdd85_8000, 0x187f_1a10]; // global_atomic_cmpswap_x2
    let fault = BusFault::Unaligned { va: DATA + 4, size: 8 };
    assert_eq!(fixture.try_run(&global), Err(Stop::Fault(fault)));
}

#[test]
fn global_memory_is_reached_by_scalar_base_and_offset() {
    let mut fixture = Fixture::new();
    fixture.set(1, |lane| 16 + 16 * lane);
    fixture.run(&[0xdc5c_9ff0, 0x1e00_0001]); // global_load_dwordx4 v[30:33], v1, s[0:1] offset:-16
    for word in 0..4 {
        assert_eq!(fixture.lane(30 + word, 9), pattern(16 * 9 + 4 * u32::from(word)));
    }
    fixture.set_addresses(|lane| DATA + 4 * lane + 1);
    fixture.run(&LOAD_DWORD);
    assert_eq!(fixture.lane(15, 2), pattern(9));
    fixture.run(&[0xdc48_0001, 0x1700_0010]); // flat_load_ushort v23, v[16:17] offset:1
    assert_eq!(fixture.lane(23, 2), pattern(10) & 0xffff);
}

#[test]
fn a_comparison_of_flat_atomics_has_the_comparand_second() {
    let mut fixture = Fixture::new();
    fixture.set_addresses(|lane| DATA + 8 * lane);
    fixture.set(26, |lane| lane);
    fixture.set(27, |_| 5);
    fixture.set(28, |lane| if lane == 3 { pattern(24) } else { 0 });
    fixture.set(29, |lane| if lane == 3 { pattern(28) } else { 0 });
    fixture.run(&[0xdd85_8000, 0x187f_1a10]); // global_atomic_cmpswap_x2 v[24:25], v[16:17], v[26:29], off glc
    assert_eq!((fixture.machine.word(DATA + 24), fixture.machine.word(DATA + 28)), (3, 5));
    assert_eq!((fixture.lane(24, 3), fixture.lane(25, 3)), (pattern(24), pattern(28)));
    assert_eq!(fixture.machine.word(DATA + 32), pattern(32));
}

/// Puts a descriptor into s[4:7].
fn describe(fixture: &mut Fixture, base: u64, stride: u32, records: u32, word3: u32) {
    fixture.wave.set_sgpr(4, base as u32);
    fixture.wave.set_sgpr(5, (base >> 32) as u32 | stride << 16);
    fixture.wave.set_sgpr(6, records);
    fixture.wave.set_sgpr(7, word3);
}

const BUFFER_LOAD: [u32; 2] = [0xe050_1000, 0x8001_2301]; // buffer_load_dword v35, v1, s[4:7], 0 offen
const BUFFER_STORE: [u32; 2] = [0xe070_1000, 0x8001_1201]; // buffer_store_dword v18, v1, s[4:7], 0 offen
/// `DATA_FORMAT_32`
const FORMAT: u32 = 4 << 15;

// C78: what is beyond the end of a buffer reads as 0 and is not written; a buffer without records has nothing but ends.
#[test]
fn buffers_end_where_they_end() {
    let mut fixture = Fixture::new();
    let offsets = [60, 64, 68, 0x8000_0000, 61];
    fixture.set(1, |lane| offsets[lane as usize % 5]);
    fixture.set(18, |lane| 0xcc00_0000 | lane);
    fixture.set(35, |_| 0xaaaa_aaaa);
    describe(&mut fixture, DATA, 0, 64, FORMAT);
    fixture.wave.set_exec(0b1_1111);
    fixture.run(&BUFFER_LOAD);
    assert_eq!([0, 1, 2, 3, 4, 5].map(|lane| fixture.lane(35, lane)), [pattern(60), 0, 0, 0, 0, 0xaaaa_aaaa]);
    fixture.run(&BUFFER_STORE);
    assert_eq!(
        [56, 60, 64, 68].map(|at| fixture.machine.word(DATA + at)),
        [pattern(56), 0xcc00_0000, pattern(64), pattern(68)]
    );
    describe(&mut fixture, 0, 0, 0, 0);
    fixture.run(&BUFFER_LOAD);
    fixture.run(&BUFFER_STORE);
    fixture.run(&[0xe108_5000, 0x8001_1201]); // buffer_atomic_add v18, v1, s[4:7], 0 offen glc
    assert_eq!((fixture.lane(35, 0), fixture.lane(18, 0)), (0, 0));
    // The last byte, with an offset from a register that counts too.
    describe(&mut fixture, DATA, 0, 64, FORMAT);
    for (scalar, expected) in [(0, 0xcc), (1, 0)] {
        fixture.wave.set_sgpr(8, scalar);
        fixture.run(&[0xe040_003f, 0x0801_2300]); // buffer_load_ubyte v35, off, s[4:7], s8 offset:63
        assert_eq!(fixture.lane(35, 0), expected);
    }
}

// With a stride and an index, the records are counted.
#[test]
fn structures_are_found_by_index() {
    let mut fixture = Fixture::new();
    describe(&mut fixture, DATA, 16, 4, FORMAT);
    fixture.set(1, |lane| lane);
    fixture.run(&[0xe054_2008, 0x8001_2401]); // buffer_load_dwordx2 v[36:37], v1, s[4:7], 0 idxen offset:8
    assert_eq!((fixture.lane(36, 3), fixture.lane(37, 3)), (pattern(56), pattern(60)));
    assert_eq!((fixture.lane(36, 4), fixture.lane(37, 4)), (0, 0));
}

// The descriptor that ROCr gives for private memory: swizzled by 64 lanes, the lane is the index.
#[test]
fn scratch_buffers_are_what_flat_private_memory_is() {
    let mut fixture = Fixture::new();
    let base = DATA + 0x1000;
    for (register, value) in
        [(8, base as u32), (9, (base >> 32) as u32 | 1 << 31), (10, 0x8000), (11, 0x00ea_4fac)]
    {
        fixture.wave.set_sgpr(register, value);
    }
    fixture.wave.set_sgpr(12, 3 * 64);
    fixture.run(&[0xe050_0004, 0x0c02_2600]); // buffer_load_dword v38, off, s[8:11], s12 offset:4
    fixture.wave.set_sgpr64(reg::FLAT_SCRATCH, base + 3 * 64);
    fixture.set_addresses(|_| (2 << 48) + 4);
    fixture.run(&LOAD_DWORD);
    assert_eq!(fixture.wave.row(38), fixture.wave.row(15));
    assert_eq!(fixture.lane(38, 7), pattern(0x1000 + 192 + 256 + 28));
}

#[test]
fn scalars_are_loaded_stored_and_changed() {
    let mut fixture = Fixture::new();
    fixture.run(&[0xc006_0500, 0x0000_0008]); // s_load_dwordx2 s[20:21], s[0:1], 0x8
    assert_eq!((fixture.wave.sgpr(20), fixture.wave.sgpr(21)), (pattern(8), pattern(12)));
    fixture.wave.set_sgpr(2, 18);
    fixture.run(&[0xc000_0580, 0x0000_0002]); // s_load_dword s22, s[0:1], s2: the low bits are dropped
    assert_eq!(fixture.wave.sgpr(22), pattern(16));
    fixture.run(&[0xc042_0580, 0x0000_0040]); // s_store_dword s22, s[0:1], 0x40
    assert_eq!(fixture.machine.word(DATA + 64), pattern(16));
    fixture.wave.set_sgpr(22, 5);
    fixture.run(&[0xc20b_0580, 0x0000_0040]); // s_atomic_add s22, s[0:1], 0x40 glc
    assert_eq!(
        (fixture.wave.sgpr(22), fixture.machine.word(DATA + 64)),
        (pattern(16), pattern(16).wrapping_add(5))
    );
    describe(&mut fixture, DATA, 0, 64, FORMAT);
    fixture.run(&[0xc02a_0602, 0x0000_0038]); // s_buffer_load_dwordx4 s[24:27], s[4:7], 0x38
    assert_eq!([24, 25, 26, 27].map(|sgpr| fixture.wave.sgpr(sgpr)), [pattern(56), pattern(60), 0, 0]);
    fixture.run(&[0xc090_0780, 0x0000_0000]); // s_memtime s[30:31]
    assert_eq!(fixture.wave.sgpr64(30), 0x1234_5678_9abc);
}

// Both ways must agree: lanes in a row are accessed at once.
#[test]
fn lanes_in_a_row_and_lanes_anywhere_load_the_same() {
    for exec in [u64::MAX, 0xff00, 1, 0b1011, u64::MAX << 63, u64::MAX >> 1] {
        let mut fixture = Fixture::new();
        fixture.wave.set_exec(exec);
        fixture.set_addresses(|lane| DATA + 0x100 + 4 * lane);
        fixture.set(15, |_| 0x5555_5555);
        fixture.run(&LOAD_DWORD);
        fixture.set_addresses(|lane| DATA + 0x2000 + 4 * lane);
        fixture.set(18, |lane| lane);
        fixture.run(&STORE_DWORD);
        for lane in 0..LANES as u32 {
            let on = exec >> lane & 1 == 1;
            let loaded = if on { pattern(0x100 + 4 * lane) } else { 0x5555_5555 };
            let stored = if on { lane } else { pattern(0x2000 + 4 * lane) };
            assert_eq!(fixture.lane(15, lane as usize), loaded);
            assert_eq!(fixture.machine.word(DATA + 0x2000 + 4 * u64::from(lane)), stored);
        }
    }
}

/// Word 3 of a descriptor of elements: components of the result from X, Y, Z and W (4 to 7), or 0 and 1.
fn elements(data_format: u32, num_format: u32, select: [u32; 4]) -> u32 {
    let [x, y, z, w] = select;
    x | y << 3 | z << 6 | w << 9 | num_format << 12 | data_format << 15
}

const LOAD_FORMAT_X: [u32; 2] = [0xe000_2000, 0x8001_2401]; // buffer_load_format_x v36, v1, s[4:7], 0 idxen
const LOAD_FORMAT_XYZW: [u32; 2] = [0xe00c_2000, 0x8001_2401]; // buffer_load_format_xyzw v[36:39], v1, s[4:7], 0 idxen
const IN_ORDER: [u32; 4] = [4, 5, 6, 7];

// What HIP's tex1Dfetch does. DATA_FORMAT and NUM_FORMAT: tables of the Vega ISA; halves: IEEE 754.
#[test]
fn elements_of_buffers_are_read_by_their_format() {
    let word = 0x8001_fffe_u32; // bytes fe ff 01 80
    let halves = 0x3800_c000; // -2 and 0.5
    let (minus2, half, one) = ((-2f32).to_bits(), 0.5f32.to_bits(), 1f32.to_bits());
    for (data, num, memory, expected) in [
        (1, 4, word, [0xfe, 0, 0, 1]),                      // 8, UINT
        (1, 5, word, [0xffff_fffe, 0, 0, 1]),               // 8, SINT
        (2, 4, word, [0xfffe, 0, 0, 1]),                    // 16, UINT
        (2, 5, word, [0xffff_fffe, 0, 0, 1]),               // 16, SINT
        (2, 7, halves, [minus2, 0, 0, one]),                // 16, FLOAT
        (3, 4, word, [0xfe, 0xff, 0, 1]),                   // 8_8, UINT
        (4, 4, word, [word, 0, 0, 1]),                      // 32, UINT
        (4, 7, minus2, [minus2, 0, 0, one]),                // 32, FLOAT
        (5, 5, word, [0xffff_fffe, 0xffff_8001, 0, 1]),     // 16_16, SINT
        (5, 7, halves, [minus2, half, 0, one]),             // 16_16, FLOAT
        (10, 4, word, [0xfe, 0xff, 0x01, 1]),               // 8_8_8_8, UINT
        (10, 5, word, [0xffff_fffe, 0xffff_ffff, 0x01, 1]), // 8_8_8_8, SINT
    ] {
        let mut fixture = Fixture::new();
        fixture.machine.store_words(DATA + 16, &[memory]).unwrap();
        describe(&mut fixture, DATA, 16, 4, elements(data, num, [4, 5, 6, 1]));
        fixture.set(1, |_| 1);
        fixture.set(40, |_| 0xaaaa_aaaa);
        fixture.wave.set_exec(1 << 5);
        fixture.run(&LOAD_FORMAT_XYZW);
        let loaded = [36, 37, 38, 39, 40].map(|vgpr| fixture.lane(vgpr, 5));
        assert_eq!(loaded[..4], expected, "data format {data}, num format {num}");
        assert_eq!(loaded[4], 0xaaaa_aaaa);
        assert_eq!(fixture.lane(36, 4), 0);
    }
}

// Records are counted; the index may come from a register of the result; a swizzle of components is applied.
#[test]
fn elements_of_several_words_end_with_the_records() {
    for (data, words) in [(11, 2), (13, 3), (14, 4)] {
        let mut fixture = Fixture::new();
        let stride = 4 * words;
        describe(&mut fixture, DATA, stride, 3, elements(data, 4, [5, 4, 6, 7]));
        fixture.set(36, |lane| lane);
        fixture.run(&[0xe00c_2000, 0x8001_2424]); // buffer_load_format_xyzw v[36:39], v36, s[4:7], 0 idxen
        for lane in 0..LANES as u32 {
            let at = |component| {
                let there = lane < 3 && component < words;
                if there { pattern(lane * stride + 4 * component) } else { 0 }
            };
            let loaded = [36, 37, 38, 39].map(|vgpr| fixture.lane(vgpr, lane as usize));
            assert_eq!(loaded, [at(1), at(0), at(2), at(3)], "data format {data}, lane {lane}");
        }
    }
}

// UNORM, packed formats, a swizzled buffer and what a 1 is beyond the end say that they are not supported.
#[test]
fn formats_that_are_not_known_stop_the_wave_and_change_nothing() {
    let not_supported = Err(Stop::NotSupported { name: "buffer_load_format_x" });
    for (stride, word3) in [
        (4, elements(4, 0, IN_ORDER)),
        (4, elements(8, 4, IN_ORDER)),
        (4, elements(0, 4, IN_ORDER)),
        (4, elements(4, 4, [2, 0, 0, 0])),
        (4 | 1 << 15, elements(4, 4, IN_ORDER)),
        (4, elements(4, 4, [1, 0, 0, 0])),
    ] {
        let mut fixture = Fixture::new();
        describe(&mut fixture, DATA, stride, 4, word3);
        fixture.set(1, |lane| lane);
        fixture.set(36, |_| 0xaaaa_aaaa);
        assert_eq!(fixture.try_run(&LOAD_FORMAT_X), not_supported, "{word3:#x}");
        assert_eq!(fixture.lane(36, 0), 0xaaaa_aaaa);
    }
    // A descriptor of zeros is an unbound buffer: it reads as 0.
    let mut fixture = Fixture::new();
    describe(&mut fixture, 0, 0, 0, 0);
    fixture.set(36, |_| 0xaaaa_aaaa);
    fixture.run(&LOAD_FORMAT_X);
    assert_eq!(fixture.lane(36, 0), 0);
}
