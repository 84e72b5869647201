//! Wave-instructions a second of CPU time, without a model around it: `cargo run --release -p kfd-isa --example speed`.

use std::sync::Arc;

use kfd_isa::Target;
use kfd_isa::bus::{Bus, BusFault, Space};
use kfd_isa::code::{CodePage, Fetch, PAGE};
use kfd_isa::group::{Group, Progress};
use kfd_isa::gws::{Operation, Ticket};
use kfd_isa::start::Start;

/// A machine with a page of code and a megabyte of words.
struct Machine {
    code: Arc<CodePage>,
    words: Vec<u32>,
}

const CODE: u64 = 0x10_0000;

impl Machine {
    fn words(&mut self, va: u64, count: usize) -> &mut [u32] {
        let start = (va / 4) as usize % self.words.len();
        let end = (start + count).min(self.words.len());
        self.words.get_mut(start..end).unwrap_or_default()
    }
}

impl Space for Machine {
    fn load(&mut self, _: u64, to: &mut [u8]) -> Result<(), BusFault> {
        to.fill(0);
        Ok(())
    }

    fn store(&mut self, _: u64, _: &[u8]) -> Result<(), BusFault> {
        Ok(())
    }

    fn load_words(&mut self, va: u64, to: &mut [u32]) -> Result<(), BusFault> {
        let count = to.len();
        for (to, word) in to.iter_mut().zip(self.words(va, count)) {
            *to = *word;
        }
        Ok(())
    }

    fn store_words(&mut self, va: u64, from: &[u32]) -> Result<(), BusFault> {
        for (word, from) in self.words(va, from.len()).iter_mut().zip(from) {
            *word = *from;
        }
        Ok(())
    }

    fn atomic32(&mut self, va: u64, change: impl Fn(u32) -> u32) -> Result<u32, BusFault> {
        let Some(word) = self.words(va, 1).first_mut() else { return Ok(0) };
        let old = *word;
        *word = change(old);
        Ok(old)
    }

    fn atomic64(&mut self, _: u64, change: impl Fn(u64) -> u64) -> Result<u64, BusFault> {
        Ok(change(0))
    }
}

impl Bus for Machine {
    fn clock(&mut self) -> u64 {
        0
    }

    fn message(&mut self, _: u16, _: u32) {}

    fn fence(&mut self) {}

    fn invalidate_code(&mut self) {}

    fn gws(&mut self, _: u32, _: Operation, _: Option<Ticket>) -> Option<Ticket> {
        None
    }
}

impl Fetch for Machine {
    fn page(&mut self, pc: u64) -> Result<Arc<CodePage>, BusFault> {
        if pc / PAGE == CODE / PAGE {
            Ok(self.code.clone())
        } else {
            Err(BusFault::Page { va: pc, write: false })
        }
    }
}

/// Nanoseconds that this thread had a CPU.
fn cpu_time() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|time| time.parse().ok()).unwrap_or(0)
}

/// A loop around some instructions.
fn measure(name: &str, body: &[u32]) {
    let mut code = vec![
        0xbe83_00ff,
        200_000, // s_mov_b32 s3, 200000
    ];
    code.extend(body);
    code.extend([
        0x8083_8103,                                       // s_sub_u32 s3, s3, 1
        0xbf07_8003,                                       // s_cmp_lg_u32 s3, 0
        0xbf85_0000 | (0xffff & !(body.len() as u32 + 2)), // s_cbranch_scc1
        0xbf81_0000,                                       // s_endpgm
    ]);
    code.resize((PAGE / 4) as usize, 0);
    let mut machine =
        Machine { code: Arc::new(CodePage::new(Target::Gfx906, CODE, code)), words: vec![1; 1 << 20] };
    let mut group = Group::default();
    let start = Start {
        entry: CODE,
        rsrc1: 63 | 0xf0 << 12 | 1 << 21 | 1 << 23,
        rsrc2: 0,
        user: [0; 16],
        id: [0; 3],
        size: [128, 1, 1],
        group_segment: 65536,
        unit: 0,
    };
    group.begin(&start, |_| 0);
    let since = cpu_time();
    while group.run(8192, &mut machine) != Ok(Progress::Done) {}
    let time = (cpu_time() - since) as f64 / 1e9;
    println!(
        "{name}: {:.1} million wave-instructions a second of CPU time",
        group.instructions() as f64 / time / 1e6
    );
}

fn main() {
    // v_fma_f32 v2, v1, v0, v2 and the like, eight of them on different registers.
    let fma: Vec<u32> = (2..10u32).flat_map(|v| [0xd1cb_0000 | v, 0x0402_0101 | v << 18]).collect();
    measure("f32 multiply and add", &fma);
    // v_add_u32_e32 vN, v0, vN; v_xor_b32_e32 vN, v1, vN
    let integer: Vec<u32> =
        (2..10u32).flat_map(|v| [0x6800_0100 | v << 17 | v << 9, 0x2a00_0101 | v << 17 | v << 9]).collect();
    measure("integer", &integer);
    // global_load_dword v2, v1, s[4:5]; v_add_u32_e32 v2, v0, v2; global_store_dword v1, v2, s[4:5], with v1 = 4 * v0
    measure(
        "global memory, lanes in a row",
        &[
            0x2402_0082, // v_lshlrev_b32_e32 v1, 2, v0
            0xdc50_8000,
            0x0204_0001, // global_load_dword v2, v1, s[4:5]
            0x6804_0500, // v_add_u32_e32 v2, v0, v2
            0xdc70_8000,
            0x0004_0201, // global_store_dword v1, v2, s[4:5]
        ],
    );
    // ds_write_b32 v1, v0; ds_read_b32 v2, v1
    measure("LDS", &[0x2402_0082, 0xd81a_0000, 0x0000_0001, 0xd86c_0000, 0x0200_0001]);
    // s_add_u32 s4, s4, s3; s_xor_b32 s5, s4, s3; s_lshl_b32 s6, s5, 3
    measure("scalar", &[0x8004_0304, 0x8805_0304, 0x8e06_8305]);
}
