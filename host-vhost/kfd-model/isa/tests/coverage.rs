//! What of the table is executed, and what says that it is not implemented.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use kfd_isa::bus::{Bus, BusFault, Space};
use kfd_isa::gws::{Operation, Ticket};
use kfd_isa::mem::lds::Lds;
use kfd_isa::op::{Kind, ROWS, Row, Targets, Traits};
use kfd_isa::salu::control;
use kfd_isa::stop::Stop;
use kfd_isa::wave::Wave;
use kfd_isa::{Encoding, Op, Target, decode, mem, salu, valu};

/// Memory that is all zeros and takes everything.
struct Zeros;

impl Space for Zeros {
    fn load(&mut self, _: u64, to: &mut [u8]) -> Result<(), BusFault> {
        to.fill(0);
        Ok(())
    }

    fn store(&mut self, _: u64, _: &[u8]) -> Result<(), BusFault> {
        Ok(())
    }

    fn load_words(&mut self, _: u64, to: &mut [u32]) -> Result<(), BusFault> {
        to.fill(0);
        Ok(())
    }

    fn store_words(&mut self, _: u64, _: &[u32]) -> Result<(), BusFault> {
        Ok(())
    }

    fn atomic32(&mut self, _: u64, _: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        Ok(0)
    }

    fn atomic64(&mut self, _: u64, _: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        Ok(0)
    }
}

impl Bus for Zeros {
    fn clock(&mut self) -> u64 {
        0
    }

    fn message(&mut self, _: u16, _: u32) {}

    fn fence(&mut self) {}

    fn gws(&mut self, _: u32, _: Operation, _: Option<Ticket>) -> Option<Ticket> {
        None
    }

    fn invalidate_code(&mut self) {}
}

/// Words with operands that every opcode of the encoding takes, or nearly every one.
fn words(row: &Row) -> [u32; 2] {
    let code = u32::from(row.code);
    // How many registers are named: fields that an opcode does not have must be 0.
    let has = |n: usize| row.src.get(n).is_some_and(|kind| *kind != Kind::None);
    let field = |present: bool, bits: u32| if present { bits } else { 0 };
    let dst = row.dst != Kind::None;
    match row.encoding {
        Encoding::Sop2 => [0x8000_0000 | code << 23 | field(dst, 16 << 16) | 8 << 8 | 4, 0],
        Encoding::Sopk => [0xb000_0000 | code << 23 | field(row.op != Op::SSetregImm32B32, 16 << 16), 0],
        Encoding::Sop1 => [0xbe80_0000 | field(dst, 16 << 16) | code << 8 | field(has(0), 4), 0],
        Encoding::Sopc => [0xbf00_0000 | code << 16 | 8 << 8 | 4, 0],
        Encoding::Sopp => [0xbf80_0000 | code << 16, 0],
        Encoding::Smem => {
            let register = dst || has(2);
            [
                0xc000_0000
                    | code << 18
                    | field(has(0), 1 << 17)
                    | field(register, 16 << 6)
                    | field(has(0), 2),
                0,
            ]
        }
        Encoding::Vop1 => [0x7e00_0000 | field(dst, 16 << 17) | code << 9 | field(has(0), 0x104), 0],
        Encoding::Vop2 => [code << 25 | 16 << 17 | 8 << 9 | 0x104, 0],
        Encoding::Vopc => [0x7c00_0000 | code << 17 | 8 << 9 | 0x104, 0],
        Encoding::Vop3 | Encoding::Vop3p => {
            let base = if row.encoding == Encoding::Vop3 { 0xd000_0000 } else { 0xd380_0000 };
            // Lanes are named by scalars, and what is written to one is one.
            let (first, second) = match row.op {
                Op::VReadlaneB32 => (0x104, 8),
                Op::VWritelaneB32 => (4, 8),
                _ => (0x104, 0x108),
            };
            let operands = first | field(has(1), second << 9) | field(has(2), 0x10c << 18);
            [base | code << 16 | 16, operands]
        }
        Encoding::Ds => {
            let gds = row.traits.contains(Traits::GDS_ONLY);
            let operands =
                field(has(0), 4) | field(has(1), 8 << 8) | field(has(2), 12 << 16) | field(dst, 16 << 24);
            [0xd800_0000 | code << 17 | field(gds, 1 << 16), operands]
        }
        Encoding::Flat | Encoding::Global | Encoding::Scratch => {
            let returns = dst && !row.traits.contains(Traits::ATOMIC);
            // As GLOBAL.
            [0xdc00_8000 | code << 18, 0x007f_0004 | field(has(1), 8 << 8) | field(returns, 16 << 24)]
        }
        Encoding::Mubuf => {
            if row.src.is_empty() {
                return [0xe000_0000 | code << 18, 0];
            }
            let lds = row.op == Op::BufferStoreLdsDword;
            [
                0xe000_0000 | code << 18 | field(lds, 1 << 16),
                0x8001_0000 | field(has(1) || (dst && !lds), 8 << 8),
            ]
        }
    }
}

fn execute(row: &Row) -> Result<(), Stop> {
    let words = words(row);
    let target = if row.targets.contains(Targets::GFX906) { Target::Gfx906 } else { Target::Gfx900 };
    let inst = decode(target, &words).unwrap_or_else(|error| panic!("{}: {error}", row.name));
    assert_eq!(inst.op, row.op);
    let (mut wave, mut lds) = (Wave::new(), Lds::default());
    lds.reset(1024);
    match row.encoding {
        Encoding::Sopp => control::execute(&mut wave, &inst, &mut Zeros).map(drop),
        Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc | Encoding::Sopk => salu::execute(&mut wave, &inst),
        Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p => {
            valu::execute(&mut wave, &inst)
        }
        _ => mem::execute(&mut wave, &inst, &mut lds, &mut Zeros),
    }
}

/// What is not implemented, in the order of the table.
const REFUSED: &[&str] = &[
    // Fork and join, skipping of vector instructions, what only a trap handler does.
    "s_cbranch_g_fork s_rfe_restore_b64 s_rfe_b64 s_cbranch_join s_setvskip s_cbranch_i_fork s_sendmsghalt",
    // Scratch by scalars, which no compiler uses.
    "s_scratch_load_dword s_scratch_load_dwordx2 s_scratch_load_dwordx4",
    "s_scratch_store_dword s_scratch_store_dwordx2 s_scratch_store_dwordx4",
    // The manual does not say what it does.
    "v_screen_partition_4se_b32",
    "ds_wrap_rtn_b32 ds_condxchg32_rtn_b64",
    // Operations of LDS on two of its places.
    "ds_add_src2_u32 ds_sub_src2_u32 ds_rsub_src2_u32 ds_inc_src2_u32 ds_dec_src2_u32 ds_min_src2_i32",
    "ds_max_src2_i32 ds_min_src2_u32 ds_max_src2_u32 ds_and_src2_b32 ds_or_src2_b32 ds_xor_src2_b32",
    "ds_write_src2_b32 ds_min_src2_f32 ds_max_src2_f32 ds_add_src2_f32",
    // Graphics.
    "ds_ordered_count",
    "ds_add_src2_u64 ds_sub_src2_u64 ds_rsub_src2_u64 ds_inc_src2_u64 ds_dec_src2_u64 ds_min_src2_i64",
    "ds_max_src2_i64 ds_min_src2_u64 ds_max_src2_u64 ds_and_src2_b64 ds_or_src2_b64 ds_xor_src2_b64",
    "ds_write_src2_b64 ds_min_src2_f64 ds_max_src2_f64",
    // Stores of elements with a format, and loads into halves.
    "buffer_store_format_x buffer_store_format_xy buffer_store_format_xyz buffer_store_format_xyzw",
    "buffer_load_format_d16_x buffer_load_format_d16_xy buffer_load_format_d16_xyz buffer_load_format_d16_xyzw",
    "buffer_store_format_d16_x buffer_store_format_d16_xy buffer_store_format_d16_xyz buffer_store_format_d16_xyzw",
    "buffer_load_format_d16_hi_x buffer_store_format_d16_hi_x",
    "buffer_store_lds_dword",
];

#[test]
fn what_is_not_implemented_says_so_and_all_else_runs() {
    let mut refused = Vec::new();
    for row in ROWS {
        match execute(row) {
            Ok(()) => {}
            Err(Stop::NotSupported { name }) => {
                assert_eq!(name, row.name);
                refused.push(name);
            }
            // What these are for.
            Err(Stop::Trap { .. }) if row.op == Op::STrap => {}
            Err(other) => panic!("{}: {other}", row.name),
        }
    }
    println!("{} of {} opcodes run", ROWS.len() - refused.len(), ROWS.len());
    let expected: Vec<_> = REFUSED.iter().flat_map(|text| text.split_whitespace()).collect();
    assert_eq!(refused, expected);
}
