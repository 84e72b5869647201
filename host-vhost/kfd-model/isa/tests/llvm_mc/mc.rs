//! Calls of llvm-mc, one process for many instructions.

use std::io::Write;
use std::process::{Command, Stdio};

use kfd_isa::Target;

/// The version whose text the decoder's follows.
const VERSION: &str = "14.";

/// llvm-mc.
pub struct Mc {
    program: &'static str,
}

/// What LLVM says of some words.
#[derive(Debug, Default)]
pub struct Listing {
    /// The instructions that they are.
    pub texts: Vec<String>,
    /// Whether it said that some of them are none.
    pub invalid: bool,
}

impl Mc {
    /// Finds it, or says why the tests cannot run.
    pub fn find() -> Result<Self, String> {
        let mut found = String::from("llvm-mc is not installed (Debian: package llvm-14)");
        for program in ["llvm-mc-14", "llvm-mc"] {
            let Ok(output) = Command::new(program).arg("--version").output() else { continue };
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let version =
                text.lines().find_map(|line| line.split_once("version ")).map(|(_, version)| version);
            match version {
                Some(version) if !version.starts_with(VERSION) => {
                    found =
                        format!("{program} is LLVM {version}, whose text differs; LLVM {VERSION}x is needed");
                }
                Some(_) if text.contains("amdgcn") => return Ok(Self { program }),
                _ => found = format!("{program} has no target amdgcn"),
            }
        }
        Err(found)
    }

    fn run(&self, target: Target, arguments: &[&str], input: String) -> (String, String) {
        let cpu = match target {
            Target::Gfx900 => "gfx900",
            Target::Gfx906 => "gfx906",
        };
        let mut child = Command::new(self.program)
            .args(["-arch=amdgcn", &format!("-mcpu={cpu}")])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        // 1 is what it returns when it has reported an error or warning.
        assert!(matches!(output.status.code(), Some(0 | 1)), "llvm-mc: {}: {stderr}", output.status);
        (String::from_utf8(output.stdout).unwrap(), stderr)
    }

    /// Assembles lines; `None` where it refuses one.
    pub fn assemble(&self, target: Target, lines: &[&str]) -> Vec<Option<Vec<u32>>> {
        let (stdout, stderr) = self.run(target, &["-show-encoding"], lines.join("\n") + "\n");
        let refused: std::collections::HashSet<usize> = messages(&stderr, " error: ").collect();
        let mut encodings =
            stdout.lines().filter_map(|line| line.split_once("encoding: [")).map(|(_, bytes)| {
                let bytes: Vec<u8> = bytes
                    .trim_end_matches(']')
                    .split(',')
                    .map(|byte| u8::from_str_radix(byte.trim_start_matches("0x"), 16).unwrap())
                    .collect();
                bytes
                    .chunks_exact(4)
                    .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
                    .collect::<Vec<u32>>()
            });
        let all = (1..=lines.len())
            .map(|number| if refused.contains(&number) { None } else { Some(encodings.next().unwrap()) })
            .collect();
        assert_eq!(encodings.next(), None, "more encodings than lines");
        all
    }

    /// Disassembles blocks of words, each on its own.
    pub fn disassemble(&self, target: Target, blocks: &[Vec<u32>]) -> Vec<Listing> {
        let marker = |number: usize| 0x5a00_0000 + u32::try_from(number).unwrap();
        let mut input = String::new();
        for (number, block) in blocks.iter().enumerate() {
            // After each block one with v_mov_b32 v255, marker: whatever LLVM reads, the listings stay apart.
            for words in [block.as_slice(), &[0x7ffe_02ff, marker(number)]] {
                let bytes: Vec<_> =
                    words.iter().flat_map(|word| word.to_le_bytes()).map(|b| b.to_string()).collect();
                input += &format!("[{}]\n", bytes.join(","));
            }
        }
        let (stdout, stderr) = self.run(target, &["--disassemble"], input);
        let mut listings: Vec<Listing> = Vec::new();
        let mut listing = Listing::default();
        for line in stdout.lines().skip(1) {
            let text = normal(line);
            if text == format!("v_mov_b32_e32 v255, {:#x}", marker(listings.len())) {
                listings.push(std::mem::take(&mut listing));
            } else if !text.is_empty() {
                listing.texts.push(text);
            }
        }
        assert_eq!(listings.len(), blocks.len(), "llvm-mc did not list all blocks");
        for number in messages(&stderr, " warning: invalid") {
            listings[(number - 1) / 2].invalid = true;
        }
        listings
    }
}

/// The lines that messages of this sort are about, from 1 on.
fn messages<'a>(stderr: &'a str, sort: &'a str) -> impl Iterator<Item = usize> + 'a {
    stderr
        .lines()
        .filter(move |line| line.contains(sort))
        .filter_map(|line| line.strip_prefix("<stdin>:")?.split(':').next()?.parse().ok())
}

/// One blank where there are several, and no comment.
fn normal(line: &str) -> String {
    let code = line.split(['/', ';']).next().unwrap_or_default();
    // A comment within the line is part of the text: LLVM has something to say of an operand.
    let code = if line.contains("/*") { line } else { code };
    code.split_whitespace().collect::<Vec<_>>().join(" ")
}
