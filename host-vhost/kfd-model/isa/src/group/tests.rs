use super::*;
use crate::testing::{CODE, DATA, Machine, start};

// Each wave writes its s2 to LDS, and after the barrier reads what its neighbour wrote.
#[test]
fn a_barrier_holds_waves_until_all_are_there() {
    let mut machine = Machine::new(&[
        0x2402_0082, // v_lshlrev_b32_e32 v1, 2, v0
        0x7e04_0200, // v_mov_b32_e32 v2, s0
        0xd81a_0000,
        0x0000_0001, // ds_write_b32 v1, v0
        0xbf8a_0000, // s_barrier
        0xd86c_0100,
        0x0300_0001, // ds_read_b32 v3, v1 offset:256
        0xdc70_8000,
        0x0000_0301, // global_store_dword v1, v3, s[0:1]
        0xbf81_0000, // s_endpgm
    ]);
    let mut group = Group::default();
    group.begin(&start(256), |_| 0);
    machine.run(&mut group).unwrap();
    for item in 0..256 {
        // The last wave reads beyond the group segment of 1024 bytes.
        let expected = if item < 192 { item + 64 } else { 0 };
        assert_eq!(machine.word(DATA + 4 * u64::from(item)), expected, "work-item {item}");
    }
    assert_eq!(group.instructions(), 4 * 7);
}

// The second wave spins on a word of LDS that the first one writes late.
#[test]
fn a_wave_that_spins_does_not_keep_the_others_from_running() {
    let mut machine = Machine::new(&[
        0x7e02_0280, // v_mov_b32_e32 v1, 0
        0x7d98_00bf, // v_cmp_gt_u32_e32 vcc, 63, v0
        0x7e04_0281, // v_mov_b32_e32 v2, 1
        0xbf86_0004, // s_cbranch_vccz 4 (the second wave)
        0xbf80_0000, // s_nop 0
        0xd81a_0000,
        0x0000_0201, // ds_write_b32 v1, v2
        0xbf81_0000, // s_endpgm
        0xd86c_0000,
        0x0300_0001, // ds_read_b32 v3, v1
        0x7d9a_0680, // v_cmp_ne_u32_e32 vcc, 0, v3
        0xbf86_fffc, // s_cbranch_vccz -4
        0xbf81_0000, // s_endpgm
    ]);
    let mut group = Group::default();
    // Wave 0 last: its first turn comes after the spinning one used up one of its own.
    group.begin(&start(128), |_| 0);
    group.next = 1;
    machine.run(&mut group).unwrap();
    assert!(group.instructions() > 500, "it spun");
}

#[test]
fn a_group_whose_waves_sleep_gives_way() {
    let mut machine = Machine::new(&[
        0xbf8e_0001, // s_sleep 1
        0xbf82_fffe, // s_branch -2
    ]);
    let mut group = Group::default();
    group.begin(&start(128), |_| 0);
    assert_eq!(group.run(1_000_000, &mut machine), Ok(Progress::Sleeps));
    assert_eq!(group.instructions(), 2);
}

#[test]
fn an_endless_loop_uses_its_budget() {
    let mut machine = Machine::new(&[0xbf82_ffff]); // s_branch -1
    let mut group = Group::default();
    group.begin(&start(64), |_| 0);
    assert_eq!(group.run(5000, &mut machine), Ok(Progress::More));
    assert_eq!(group.instructions(), 5000);
}

#[test]
fn what_stops_a_wave_is_told_with_its_place() {
    let halt = |code: &[u32]| {
        let mut group = Group::default();
        group.begin(&start(1), |_| 0);
        group.run(1000, &mut Machine::new(code)).unwrap_err()
    };
    // s_nop 0, then bits that no encoding has.
    let illegal = halt(&[0xbf80_0000, 0xffff_ffff]);
    assert_eq!(illegal, Halt { pc: CODE + 4, word: 0xffff_ffff, stop: Stop::Illegal });
    assert_eq!(halt(&[0xbf92_0002]).stop, Stop::Trap { id: 2 }); // s_trap 2
    // s_setpc_b64 s[0:1]: to the data, which are no code.
    let fault = halt(&[0xbe80_1d00]);
    assert_eq!((fault.pc, fault.word), (DATA, 0));
    assert_eq!(fault.stop, Stop::Fault(crate::bus::BusFault::Page { va: DATA, write: false }));
    // s_mov_b32 s0, 2; s_mov_b32 s1, 0; s_setpc_b64 s[0:1]: between words.
    assert_eq!(halt(&[0xbe80_0082, 0xbe81_0080, 0xbe80_1d00]).stop, Stop::Illegal);
}

#[test]
fn messages_arrive_with_m0_and_debug_traps_do_nothing() {
    let mut machine = Machine::new(&[
        0xbefc_00a0, // s_mov_b32 m0, 32
        0xbf90_0001, // s_sendmsg sendmsg(MSG_INTERRUPT)
        0xbf92_0003, // s_trap 3
        0xbf81_0000, // s_endpgm
    ]);
    let mut group = Group::default();
    group.begin(&start(1), |_| 0);
    machine.run(&mut group).unwrap();
    assert_eq!(machine.messages, [(1, 32)]);
}

#[test]
fn a_machine_that_is_exhausted_ends_the_slice_at_once() {
    let mut machine = Machine::new(&[
        0xc002_0080,
        0x0000_0000, // s_load_dword s2, s[0:1], 0x0
        0xbf82_fffd, // s_branch -3
    ]);
    let mut group = Group::default();
    group.begin(&start(128), |_| 0);
    machine.accesses = 7;
    assert_eq!(group.run(1_000_000, &mut machine), Ok(Progress::More));
    assert_eq!(group.instructions(), 13, "seven loads and what lies between them");
}
