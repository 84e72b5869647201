//! Whatever words a program has and whatever its registers hold: an instruction ends or says why it does not. Nothing
//! panics, overflows (the tests are built with checks) or waits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use kfd_isa::bus::{Bus, BusFault, Space};
use kfd_isa::gws::{Gws, Operation, Ticket};
use kfd_isa::mem::lds::Lds;
use kfd_isa::salu::control;
use kfd_isa::wave::{Mode, Row, Wave};
use kfd_isa::{Encoding, Target, decode, mem, salu, valu};

/// Instructions per test.
const COUNT: usize = 100_000;

/// How many runs of an instruction there are between two new states of the wave.
const FRESH: usize = 50;

/// A small generator (splitmix64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of.get((self.next() % of.len() as u64) as usize).copied().unwrap()
    }

    /// Most of them with few bits set, as instructions are.
    fn word(&mut self) -> u32 {
        let ands = self.pick(&[0, 1, 2]);
        (0..ands).fold(self.next() as u32, |word, _| word & self.next() as u32)
    }

    /// A value that instructions may stumble over.
    fn value(&mut self) -> u32 {
        const SPECIAL: [u32; 20] = [
            0,
            1,
            u32::MAX,
            0x8000_0000,
            0x7fff_ffff,
            31,
            32,
            63,
            64,
            0xffff,
            0x8000,
            // Floats: one, least denormal, greatest, infinities, quiet and signalling NaN; a double's high half.
            0x3f80_0000,
            0x0000_0002,
            0x7f7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7fc0_0000,
            0x7fa0_0000,
            0x7ff0_0000,
            0x7fef_ffff,
        ];
        if self.next() & 3 == 0 { self.next() as u32 } else { self.pick(&SPECIAL) }
    }
}

/// Memory in half of all places.
#[derive(Default)]
struct Somewhere(Gws);

impl Somewhere {
    fn at(va: u64) -> Result<(), BusFault> {
        if va & 0x100 == 0 { Ok(()) } else { Err(BusFault::Page { va, write: false }) }
    }
}

impl Space for Somewhere {
    fn load(&mut self, va: u64, to: &mut [u8]) -> Result<(), BusFault> {
        to.fill(va as u8);
        Self::at(va)
    }

    fn store(&mut self, va: u64, _: &[u8]) -> Result<(), BusFault> {
        Self::at(va)
    }

    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        to.fill(va as u32);
        Self::at(va)
    }

    fn store_words(&mut self, va: u64, _: &[u32]) -> Result<(), BusFault> {
        Self::at(va)
    }

    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        change(va as u32);
        Self::at(va).map(|()| va as u32)
    }

    fn atomic64(&mut self, va: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        change(va);
        Self::at(va).map(|()| va)
    }
}

impl Bus for Somewhere {
    fn clock(&mut self) -> u64 {
        u64::MAX
    }

    fn message(&mut self, _: u16, _: u32) {}

    fn fence(&mut self) {}

    fn gws(&mut self, resource: u32, operation: Operation, ticket: Option<Ticket>) -> Option<Ticket> {
        self.0.ask(resource, operation, ticket)
    }

    fn invalidate_code(&mut self) {}
}

/// The encodings: bits that are fixed, and bits that are free.
const ENCODINGS: [(u32, u32); 20] = [
    (0x8000_0000, 0x7fff_ffff),
    (0xb000_0000, 0x0fff_ffff),
    (0xbe80_0000, 0x007f_ffff),
    (0xbf00_0000, 0x007f_ffff),
    (0xbf80_0000, 0x007f_ffff),
    (0xc000_0000, 0x03ff_ffff),
    (0x7e00_0000, 0x01ff_ffff),
    (0x0000_0000, 0x7fff_ffff),
    (0x7c00_0000, 0x01ff_ffff),
    (0xd000_0000, 0x03ff_ffff),
    (0xd1c0_0000, 0x00ff_ffff),
    (0xd380_0000, 0x007f_ffff),
    (0xd800_0000, 0x03ff_ffff),
    (0xdc00_0000, 0x03ff_ffff),
    (0xe000_0000, 0x03ff_ffff),
    (0x7e00_00f9, 0x01ff_fe00),
    (0x0000_00f9, 0x7fff_fe00),
    (0x7c00_00f9, 0x01ff_fe00),
    (0x7e00_00fa, 0x01ff_fe00),
    (0x0000_00fa, 0x7fff_fe00),
];

fn scramble(wave: &mut Wave, random: &mut Random) {
    wave.set_exec(u64::MAX);
    for register in 0..256 {
        wave.write_row(register, &Row(std::array::from_fn(|_| random.value())));
    }
    for register in 0..128 {
        wave.set_sgpr(register, random.value());
    }
    let exec = [0, 1, 1 << 63, u64::MAX, random.next()];
    wave.set_exec(random.pick(&exec));
    wave.pc = random.next() & !3;
    wave.scc = random.next() & 1 != 0;
    // Rounding and denormals in all combinations, relative addressing now and then.
    wave.mode =
        Mode(random.next() as u32 & 0x3ff | if random.next() & 7 == 0 { Mode::GPR_IDX_EN } else { 0 });
}

#[test]
fn no_instruction_panics() {
    let mut random = Random(1);
    let (mut wave, mut lds, mut bus) = (Wave::new(), Lds::default(), Somewhere::default());
    let mut executed = 0;
    while executed < COUNT {
        let (fixed, free) = random.pick(&ENCODINGS);
        let words = [fixed | random.word() & free, random.word()];
        let target = random.pick(&[Target::Gfx900, Target::Gfx906]);
        let Ok(inst) = decode(target, &words) else { continue };
        if executed % FRESH == 0 {
            scramble(&mut wave, &mut random);
            lds.reset(random.pick(&[0, 4, 1024, 65536]));
        }
        executed += 1;
        wave.pc = wave.pc.wrapping_add(inst.bytes());
        let done = catch_unwind(AssertUnwindSafe(|| match inst.encoding {
            Encoding::Sopp => control::execute(&mut wave, &inst, &mut bus).map(drop),
            Encoding::Sop1 | Encoding::Sop2 | Encoding::Sopc | Encoding::Sopk => {
                salu::execute(&mut wave, &inst)
            }
            Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc | Encoding::Vop3 | Encoding::Vop3p => {
                valu::execute(&mut wave, &inst)
            }
            _ => mem::execute(&mut wave, &inst, &mut lds, &mut bus),
        }));
        if done.is_err() {
            panic!("{inst} ({words:08x?}) panics with MODE {:#x}, EXEC {:#x}", wave.mode.0, wave.exec());
        }
    }
}
