//! What GPUs of the model see: the other end of the requests that the C programs below tests/c/memory make.
//!
//! A request is a line that begins with `@`:
//! - `@meet TOKEN GPU VA`: the process has written the 16 bytes of TOKEN (hexadecimal, as two native words) to VA; the
//!   model that has them there is this process's. Answer: `met`.
//! - `@check TOKEN GPU VA LENGTH SEED`: compares what the GPU reads with the pattern. Answer: `same`, `differs at OFFSET`
//!   or a fault.
//! - `@fill TOKEN GPU VA LENGTH SEED`: lets the GPU write the pattern. Answer: `done` or a fault.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kfd_model::debug::{HsaHwExceptionData, Mailbox, MailboxError};

/// Bytes that are compared or written at once.
const CHUNK: u64 = 64 << 10;

/// The processes of one directory of mailboxes.
#[derive(Debug)]
pub struct GpuView {
    directory: PathBuf,
    met: HashMap<String, Mailbox>,
}

impl GpuView {
    /// Processes whose models leave their mailboxes in `directory`.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), met: HashMap::new() }
    }

    /// The answer to a request.
    ///
    /// # Errors
    /// A request that is none, a process that is not found, or a model that does not answer.
    pub fn answer(&mut self, request: &str) -> Result<String> {
        self.try_answer(request).with_context(|| format!("request {request:?}"))
    }

    fn try_answer(&mut self, request: &str) -> Result<String> {
        let mut words = request.split_whitespace();
        let mut word = || words.next().context("a word is missing");
        let (what, token, gpu) = (word()?, word()?.to_owned(), word()?.parse().context("a GPU's id")?);
        let va = number(word()?)?;
        if what == "@meet" {
            let mailbox = self.find(&token, gpu, va)?;
            self.met.insert(token, mailbox);
            return Ok("met".to_owned());
        }
        let (length, seed) = (number(word()?)?, number(word()?)?);
        let mailbox = self.met.get(&token).context("a process that has not been met")?;
        let answer = match what {
            "@check" => check(mailbox, gpu, va, length, seed),
            "@fill" => fill(mailbox, gpu, va, length, seed),
            _ => bail!("no such request"),
        };
        match answer {
            Ok(answer) => Ok(answer),
            Err(MailboxError::Fault(fault)) => {
                let offset = fault.va.wrapping_sub(va);
                Ok(format!("fault: {} at {offset:#x}, {}", fault.access, fault.reason))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The mailbox of the process that has the token's bytes at an address.
    fn find(&self, token: &str, gpu: u32, va: u64) -> Result<Mailbox> {
        let (high, low) = token.split_at_checked(16).context("a token of 32 digits")?;
        let mut expected = [0; 16];
        for (bytes, word) in expected.chunks_exact_mut(8).zip([high, low]) {
            bytes.copy_from_slice(&u64::from_str_radix(word, 16).context("a token")?.to_ne_bytes());
        }
        let mut seen = Vec::new();
        for mailbox in Mailbox::find(&self.directory)? {
            let mut found = [0; 16];
            match mailbox.read(gpu, va, &mut found) {
                Ok(()) if found == expected => return Ok(mailbox),
                Ok(()) => seen.push(format!("{}: other bytes", mailbox.path().display())),
                Err(error) => seen.push(format!("{}: {error}", mailbox.path().display())),
            }
        }
        bail!("no process has it at {va:#x} for its GPU {gpu}; there are: {seen:?}")
    }
}

/// Tells all processes whose models leave their mailboxes in `directory` that a GPU was reset. Returns how many events heard it.
/// Processes without GPU memory hear nothing, and a daemon's device process may end meanwhile.
///
/// # Errors
/// A mailbox that cannot be read, or a model that does not answer.
pub fn reset(directory: &Path, data: &HsaHwExceptionData) -> Result<u64, MailboxError> {
    let mut heard: u64 = 0;
    for mailbox in Mailbox::find(directory)? {
        match mailbox.reset(data) {
            Ok(events) => heard = heard.saturating_add(events),
            Err(MailboxError::Fault(_) | MailboxError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(heard)
}

fn number(word: &str) -> Result<u64> {
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.with_context(|| format!("the number {word:?}"))
}

/// The pattern of the C programs (`pattern` in harness.c) with this seed: the bytes of a range whose start is a multiple of
/// 256. What a byte adds to its block's first one depends on its place in the block alone.
fn pattern(seed: u64, range: &Range<u64>) -> Vec<u8> {
    let steps: [u8; 256] = std::array::from_fn(|at| at.wrapping_mul(11).to_le_bytes()[0]);
    let mut bytes = Vec::new();
    let mut block = range.start;
    while block < range.end {
        let terms = [
            seed.wrapping_mul(37),
            (block >> 8).wrapping_mul(5),
            (block >> 12).wrapping_mul(3),
            (block >> 20).wrapping_mul(7),
            1,
        ];
        let first = terms.into_iter().fold(0_u64, u64::wrapping_add).to_le_bytes()[0];
        let length = usize::try_from(range.end.saturating_sub(block)).unwrap_or(usize::MAX);
        bytes.extend(steps.iter().take(length).map(|step| first.wrapping_add(*step)));
        block = block.saturating_add(256);
    }
    bytes
}

fn chunks(length: u64) -> impl Iterator<Item = Range<u64>> {
    let count = length.div_ceil(CHUNK);
    (0..count).map(move |number| {
        let start = number.saturating_mul(CHUNK);
        start..start.saturating_add(CHUNK).min(length)
    })
}

fn check(mailbox: &Mailbox, gpu: u32, va: u64, length: u64, seed: u64) -> Result<String, MailboxError> {
    for range in chunks(length) {
        let expected = pattern(seed, &range);
        let mut found = vec![0; expected.len()];
        mailbox.read(gpu, va.wrapping_add(range.start), &mut found)?;
        if let Some(at) = expected.iter().zip(&found).position(|(expected, found)| expected != found) {
            let offset = range.start.saturating_add(u64::try_from(at).unwrap_or(u64::MAX));
            return Ok(format!("differs at {offset:#x}"));
        }
    }
    Ok("same".to_owned())
}

fn fill(mailbox: &Mailbox, gpu: u32, va: u64, length: u64, seed: u64) -> Result<String, MailboxError> {
    for range in chunks(length) {
        let start = va.wrapping_add(range.start);
        mailbox.write(gpu, start, &pattern(seed, &range))?;
    }
    Ok("done".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed by hand from the formula in harness.c.
    #[test]
    fn the_pattern_is_that_of_the_c_programs() {
        let bytes = pattern(2, &(0..(1 << 20) + 300));
        let expected = |number: u64| {
            (2 * 37 + number * 11 + (number >> 8) * 5 + (number >> 12) * 3 + (number >> 20) * 7 + 1) as u8
        };
        assert_eq!(bytes.len(), (1 << 20) + 300);
        for number in [0, 1, 255, 256, 4095, 4096, 70_000, 1 << 20, (1 << 20) + 299] {
            assert_eq!(bytes[number as usize], expected(number), "{number}");
        }
    }
}
