//! Looks at a process's GPU memory through its debug mailbox.
//!
//! `model_memory DIRECTORY` lists the processes; `model_memory FILE GPU_ID VA [LENGTH]` prints bytes,
//! `model_memory FILE GPU_ID VA =TEXT` writes some. Numbers as `12` or `0x7f00`.
#![allow(clippy::print_stdout, reason = "what it is for")]

use std::error::Error;
use std::path::Path;

use kfd_model::debug::Mailbox;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        [directory] => {
            for mailbox in Mailbox::find(Path::new(directory))? {
                println!("{}", mailbox.path().display());
            }
        }
        [file, gpu_id, va, rest @ ..] => {
            let mailbox = Mailbox::open(Path::new(file))?;
            let (gpu_id, va) = (u32::try_from(number(gpu_id)?)?, number(va)?);
            if let Some(text) = rest.first().and_then(|text| text.strip_prefix('=')) {
                mailbox.write(gpu_id, va, text.as_bytes())?;
                return Ok(());
            }
            let length = rest.first().map_or(Ok(64), |length| number(length))?;
            let entry = mailbox.entry(gpu_id, va)?;
            println!("mapping {:#x}, {:#x} bytes, {:?}", entry.start, entry.size, entry.flags);
            let mut bytes = vec![0; usize::try_from(length)?];
            mailbox.read(gpu_id, va, &mut bytes)?;
            for (line, bytes) in (0u64..).zip(bytes.chunks(16)) {
                let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                println!("{:#x}: {}", va.wrapping_add(line.wrapping_mul(16)), hex.join(" "));
            }
        }
        _ => return Err("usage: model_memory DIRECTORY | FILE GPU_ID VA [LENGTH | =TEXT]".into()),
    }
    Ok(())
}

fn number(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}
