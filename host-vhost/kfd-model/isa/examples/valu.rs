//! Measures the vector handlers: nanoseconds an instruction takes for 64 lanes, for every opcode or those whose
//! mnemonics contain the first argument, with all lanes on and with half of them on. Not a test.
//!
//! `cargo run --release -p kfd-isa --example valu [part of a mnemonic]`

use std::hint::black_box;
use std::time::Instant;

use kfd_isa::inst::{Inst, MemFlags, Modifiers, SubWord};
use kfd_isa::op::{Kind, ROWS, Traits};
use kfd_isa::wave::{Row, Wave};
use kfd_isa::{Dst, Encoding, Src, valu};

/// Runs of one measurement; the best of [`REPEATS`] counts.
const RUNS: u32 = 2_000;
const REPEATS: u32 = 15;

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let mut results = Vec::new();
    for row in ROWS {
        let vector = matches!(
            row.encoding,
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vop3 | Encoding::Vop3p | Encoding::Vopc
        );
        if !vector || !row.name.contains(&wanted) || valu::handler(row.op).is_none() {
            continue;
        }
        let mut src = [Src::None; 4];
        for (number, (to, kind)) in src.iter_mut().zip(row.src).enumerate() {
            *to = if *kind == Kind::Mask { Src::Sgpr(20) } else { Src::Vgpr(8 * (number as u8 + 1)) };
        }
        let scalar = row.dst == Kind::Mask || row.traits.contains(Traits::SGPR_DST);
        let carry = row.traits.contains(Traits::CARRY_OUT);
        let inst = Inst {
            op: row.op,
            encoding: row.encoding,
            words: 1,
            dst: if scalar { Dst::Sgpr(30) } else { Dst::Vgpr(40) },
            sdst: if carry { Dst::Sgpr(32) } else { Dst::None },
            src,
            modifiers: Modifiers::NONE,
            sub: SubWord::None,
            imm: 0,
            flags: MemFlags::empty(),
        };
        let mut wave = Wave::new();
        for n in 0..64u8 {
            let values = Row(std::array::from_fn(|lane| (1.0 + lane as f32 / 7.0 + f32::from(n)).to_bits()));
            wave.write_row(usize::from(n), &values);
        }
        let full = measure(&mut wave, &inst, u64::MAX);
        let half = measure(&mut wave, &inst, 0x5555_aaaa_ffff_0000);
        results.push((full, half, row.name));
    }
    results.sort_by(|a, b| a.0.total_cmp(&b.0));
    println!("ns, all lanes on; ns, some on; mnemonic");
    for (full, half, name) in &results {
        println!("{full:8.1} {half:8.1} {name}");
    }
}

/// Nanoseconds of one instruction.
fn measure(wave: &mut Wave, inst: &Inst, exec: u64) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..REPEATS {
        let start = Instant::now();
        for _ in 0..RUNS {
            wave.set_exec(exec);
            let _ = valu::execute(wave, black_box(inst));
        }
        best = best.min(start.elapsed().as_secs_f64() / f64::from(RUNS) * 1e9);
    }
    best
}
