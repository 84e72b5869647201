//! The same kind of questions through the whole stack: guest library's client, loop-back, daemon, worker.

use crate::transcript::Transcript;

pub fn run(_transcript: &mut Transcript) -> anyhow::Result<()> {
    anyhow::bail!("NOT_IMPLEMENTED")
}
