//! `kfd-oracle direct|loopback`: prints the answers of the KFD under it to a fixed list of questions. Run it on
//! the real driver without a GPU and on the model without a GPU: the transcripts must be the same.

mod direct;
mod loopback;
mod transcript;

fn main() -> anyhow::Result<()> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let mut transcript = transcript::Transcript::default();
    match mode.as_str() {
        "direct" => direct::run(&mut transcript)?,
        "loopback" => loopback::run(&mut transcript)?,
        _ => anyhow::bail!("usage: kfd-oracle direct|loopback, found {mode:?}"),
    }
    for line in transcript.lines() {
        println!("{line}");
    }
    Ok(())
}
