use super::*;
use crate::decode;
use crate::op::Target;

fn run(wave: &mut Wave, words: &[u32]) {
    let inst = decode(Target::Gfx906, words).unwrap();
    wave.pc += inst.bytes();
    execute(wave, &inst).unwrap();
}

/// Runs one instruction that works on s2 and s3 (or pairs from s2 and s4 on) and writes s6 (and s7).
fn on(a: u64, b: u64, scc: bool, words: &[u32]) -> (u64, bool) {
    let mut wave = Wave::new();
    wave.set_sgpr64(2, a);
    wave.set_sgpr64(4, b);
    wave.scc = scc;
    run(&mut wave, words);
    (wave.sgpr64(6), wave.scc)
}

const MAX: u64 = 0xffff_ffff;

#[test]
fn carries_and_overflows_go_to_scc() {
    let add = |a, b| on(a, b, false, &[0x8006_0402]); // s_add_u32 s6, s2, s4
    assert_eq!(add(MAX, 1), (0, true));
    assert_eq!(add(MAX - 1, 1), (MAX, false));
    let addc = |a, b, scc| on(a, b, scc, &[0x8206_0402]); // s_addc_u32 s6, s2, s4
    assert_eq!(addc(MAX, 0, true), (0, true));
    assert_eq!(addc(MAX, MAX, true), (MAX, true));
    assert_eq!(addc(1, 1, false), (2, false));
    let subb = |a, b, scc| on(a, b, scc, &[0x8286_0402]); // s_subb_u32 s6, s2, s4
    assert_eq!(subb(0, 0, true), (MAX, true));
    assert_eq!(subb(5, 4, true), (0, false));
    let sub = |a, b| on(a, b, false, &[0x8186_0402]); // s_sub_i32 s6, s2, s4
    assert_eq!(sub(0x8000_0000, 1), (0x7fff_ffff, true));
    assert_eq!(sub(0, 1), (MAX, false));
}

#[test]
fn shifts_take_the_low_bits_of_the_amount() {
    assert_eq!(on(0b11, 33, false, &[0x8e06_0402]), (0b110, true)); // s_lshl_b32 s6, s2, s4
    assert_eq!(on(1 << 63, 127, false, &[0x8f86_0402]), (1, true)); // s_lshr_b64 s[6:7], s[2:3], s4
    assert_eq!(on(0x8000_0000, 63, false, &[0x9006_0402]), (MAX, true)); // s_ashr_i32 s6, s2, s4
    assert_eq!(on(0x8000_0000, 32, false, &[0x8f06_0402]), (0x8000_0000, true)); // s_lshr_b32 s6, s2, s4
}

// Offset in bits 4:0, width in bits 22:16.
#[test]
fn fields_are_extracted() {
    let unsigned = |value, control| on(value, control, false, &[0x9286_0402]); // s_bfe_u32 s6, s2, s4
    assert_eq!(unsigned(0xabcd_1234, 8 << 16 | 16), (0xcd, true));
    assert_eq!(unsigned(0xabcd_1234, 0), (0, false));
    assert_eq!(unsigned(0xabcd_1234, 127 << 16 | 4), (0xabc_d123, true));
    let signed = |value, control| on(value, control, false, &[0x9306_0402]); // s_bfe_i32 s6, s2, s4
    assert_eq!(signed(0xabcd_1234, 8 << 16 | 16), (MAX - 0x32, true));
    assert_eq!(signed(0x8000_0000, 32 << 16 | 31), (MAX, true));
}

#[test]
fn bits_are_found_and_counted() {
    let none = MAX;
    assert_eq!(on(0, 0, false, &[0xbe86_1002]).0, none); // s_ff1_i32_b32 s6, s2
    assert_eq!(on(1 << 40, 0, false, &[0xbe86_1102]).0, 40); // s_ff1_i32_b64 s6, s[2:3]
    assert_eq!(on(1 << 3, 0, false, &[0xbe86_1202]).0, 28); // s_flbit_i32_b32 s6, s2
    // s_flbit_i32 s6, s2: bits like the sign.
    assert_eq!(on(0xff00_0000, 0, false, &[0xbe86_1402]).0, 8);
    assert_eq!(on(MAX, 0, false, &[0xbe86_1402]).0, none);
    assert_eq!(on(MAX, 0, false, &[0xbe86_0c02]), (32, true)); // s_bcnt1_i32_b32 s6, s2
    assert_eq!(on(u64::MAX, 0, true, &[0xbe86_0b02]), (0, false)); // s_bcnt0_i32_b64 s6, s[2:3]
    assert_eq!(on(0x0011_0f00, 0, false, &[0xbe86_2802]), (0b11_0100, true)); // s_quadmask_b32 s6, s2
    assert_eq!(on(0x0011_0f00, 0, false, &[0xbe86_0602]), (0xff_0f00, true)); // s_wqm_b32 s6, s2
}

#[test]
fn exec_is_saved_and_changed() {
    let mut wave = Wave::new();
    wave.set_exec(0b1100);
    wave.set_sgpr64(2, 0b1010);
    run(&mut wave, &[0xbe86_2002]); // s_and_saveexec_b64 s[6:7], s[2:3]
    assert_eq!((wave.exec(), wave.sgpr64(6), wave.scc), (0b1000, 0b1100, true));
    run(&mut wave, &[0xbe86_2306]); // s_andn2_saveexec_b64 s[6:7], s[6:7]
    assert_eq!((wave.exec(), wave.sgpr64(6), wave.scc), (0b0100, 0b1000, true));
    run(&mut wave, &[0xbe86_22c1]); // s_xor_saveexec_b64 s[6:7], -1
    assert_eq!((wave.exec(), wave.sgpr64(6)), (!0b0100, 0b0100));
    wave.set_exec(0b1100);
    run(&mut wave, &[0xbe86_3602]); // s_andn2_wrexec_b64 s[6:7], s[2:3]
    assert_eq!((wave.exec(), wave.sgpr64(6), wave.scc), (0b0010, 0b0010, true));
}

#[test]
fn constants_are_as_wide_as_the_operand() {
    assert_eq!(on(0, 0, false, &[0xbe86_01c1]).0, u64::MAX); // s_mov_b64 s[6:7], -1
    assert_eq!(on(0, 0, false, &[0xbe86_01f2]).0, 1f64.to_bits()); // s_mov_b64 s[6:7], 1.0
    assert_eq!(on(0, 0, false, &[0xbe86_00f2]).0, u64::from(1f32.to_bits())); // s_mov_b32 s6, 1.0
    assert_eq!(on(0, 0, false, &[0xb006_8000]).0, 0xffff_8000); // s_movk_i32 s6, 0x8000
}

// llvm/llvm-project#70274: hardware extends a literal by its sign for signed operands alone. clang 21 and 22 mask the high half of
// a product so, without optimisation.
#[test]
fn literals_of_64_bits_keep_their_sign_where_the_operand_has_one() {
    assert_eq!(on(0, 0, false, &[0xbe86_01ff, 0xffff_ffff]).0, 0xffff_ffff); // s_mov_b64 s[6:7], 0xffffffff
    // s_ashr_i64 s[6:7], 0x80000000, 4
    assert_eq!(on(0, 0, false, &[0x9086_84ff, 0x8000_0000]).0, 0xffff_ffff_f800_0000);
    // s_bfe_i64 s[6:7], 0x80000000, s4: 16 bits from bit 28 on.
    assert_eq!(on(0, 16 << 16 | 28, false, &[0x9406_04ff, 0x8000_0000]).0, 0xffff_ffff_ffff_fff8);
    // s_bfe_u64 s[6:7], 0x80000000, s4
    assert_eq!(on(0, 16 << 16 | 28, false, &[0x9386_04ff, 0x8000_0000]).0, 8);
    // The others with a signed operand in llvm/llvm-project#186575: s_flbit_i32_i64 s6, 0xffffff00, against s_flbit_i32_b64.
    assert_eq!(on(0, 0, false, &[0xbe86_15ff, 0xffff_ff00]).0, 56);
    assert_eq!(on(0, 0, false, &[0xbe86_13ff, 0xffff_ff00]).0, 32);
    // -1 has no bit that differs from its sign.
    assert_eq!(on(0, 0, false, &[0xbe86_15ff, 0xffff_ffff]).0, 0xffff_ffff);
}

// LDS_BASE is 1 << 48 and scratch's 2 << 48 (kfd_init_apertures_v9). The high halves of 64 bits in both ways to read them.
#[test]
fn apertures_are_those_that_the_driver_tells() {
    assert_eq!(on(0, 0, false, &[0xbe86_01eb]).0, 1 << 48); // s_mov_b64 s[6:7], src_shared_base
    assert_eq!(on(0, 0, false, &[0xbe86_01ed]).0, 2 << 48); // s_mov_b64 s[6:7], src_private_base
    // s_getreg_b32 s6, hwreg(HW_REG_SH_MEM_BASES, 16, 16), and the low half.
    assert_eq!(on(0, 0, false, &[0xb886_7c0f]).0, 1);
    assert_eq!(on(0, 0, false, &[0xb886_780f]).0, 2);
}

#[test]
fn the_mode_register_is_written_by_fields() {
    let mut wave = Wave::new();
    wave.mode = Mode(0x3c0);
    run(&mut wave, &[0xba00_1901, 0x0000_0003]); // s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 3
    assert_eq!(wave.mode, Mode(0x330));
    run(&mut wave, &[0xb886_f801]); // s_getreg_b32 s6, hwreg(HW_REG_MODE)
    assert_eq!(wave.sgpr(6), 0x330);
}

#[test]
fn calls_return() {
    let mut wave = Wave::new();
    wave.pc = 0x1000;
    run(&mut wave, &[0xba86_0010]); // s_call_b64 s[6:7], 16
    assert_eq!((wave.pc, wave.sgpr64(6)), (0x1044, 0x1004));
    run(&mut wave, &[0xbe86_1e06]); // s_swappc_b64 s[6:7], s[6:7]
    assert_eq!((wave.pc, wave.sgpr64(6)), (0x1004, 0x1048));
    run(&mut wave, &[0xbe86_1c00]); // s_getpc_b64 s[6:7]
    assert_eq!(wave.sgpr64(6), 0x1008);
}

#[test]
fn comparisons_mind_the_sign() {
    let compare = |word: u32| on(MAX, 1, false, &[word]).1;
    assert!(compare(0xbf04_0402)); // s_cmp_lt_i32 s2, s4
    assert!(!compare(0xbf0a_0402)); // s_cmp_lt_u32 s2, s4
    assert!(!compare(0xbf12_0402)); // s_cmp_eq_u64 s[2:3], s[4:5]
    // s_cmpk_eq_i32 s2, -1 and s_cmpk_eq_u32 s2, 0xffff
    assert!(compare(0xb102_ffff));
    assert!(!compare(0xb402_ffff));
    assert!(on(0xffff, 0, false, &[0xb402_ffff]).1);
}

#[test]
fn a_register_is_reached_through_m0() {
    let mut wave = Wave::new();
    wave.set_sgpr(12, 77);
    wave.set_sgpr(reg::M0, 10);
    run(&mut wave, &[0xbe86_2a02]); // s_movrels_b32 s6, s2
    assert_eq!(wave.sgpr(6), 77);
    wave.set_sgpr(reg::M0, 200);
    let inst = decode(Target::Gfx906, &[0xbe86_2a02]).unwrap();
    assert_eq!(execute(&mut wave, &inst), Err(Stop::Illegal));
}
