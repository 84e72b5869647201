//! rocminfo's output, taken apart.

/// An agent's lines, as printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// Its lines, without the heading.
    pub lines: Vec<String>,
}

impl Agent {
    /// The value of the first line with this name.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.lines.iter().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            (found.trim() == name).then(|| value.trim())
        })
    }

    /// Whether it is a GPU.
    pub fn is_gpu(&self) -> bool {
        self.value("Device Type") == Some("GPU")
    }
}

/// The agents of a whole output, in its order.
pub fn agents(text: &str) -> Vec<Agent> {
    let mut agents: Vec<Agent> = Vec::new();
    for line in text.lines() {
        let heading = line.trim_end_matches(['*', ' ']);
        if heading.starts_with("Agent ") && heading.split_whitespace().count() == 2 {
            agents.push(Agent { lines: Vec::new() });
        } else if line.starts_with("*** Done") {
            break;
        } else if let Some(agent) = agents.last_mut()
            && !line.chars().all(|letter| letter == '*')
        {
            agent.lines.push(line.trim_end().to_owned());
        }
    }
    agents
}

/// The agents that are GPUs.
pub fn gpus(text: &str) -> Vec<Agent> {
    agents(text).into_iter().filter(Agent::is_gpu).collect()
}

/// What is before the first agent: the runtime's own attributes.
pub fn system(text: &str) -> Vec<&str> {
    text.lines().take_while(|line| !line.starts_with("Agent ")).map(str::trim_end).collect()
}

/// Lines that two agents do not have in common, as `name: left | right`; lines with one of the `exempt` names are not
/// compared, but must be there on both sides.
pub fn differences(left: &Agent, right: &Agent, exempt: &[&str]) -> Vec<String> {
    let name = |line: &str| line.split(':').next().unwrap_or_default().trim().to_owned();
    let mut found = Vec::new();
    for number in 0..left.lines.len().max(right.lines.len()) {
        let at = |agent: &Agent| agent.lines.get(number).cloned().unwrap_or_else(|| "(no line)".to_owned());
        let (a, b) = (at(left), at(right));
        let exempt = exempt.contains(&name(&a).as_str()) && name(&a) == name(&b);
        if a != b && !exempt {
            found.push(format!("line {number}: {a:?} | {b:?}"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shape of rocminfo 6.1's output.
    const TEXT: &str = "ROCk module is loaded\n=====\nHSA System Attributes\n=====\nRuntime Version:         1.1\n\n\
        ==========\nHSA Agents\n==========\n*******\nAgent 1\n*******\n  Name:                    cpu\n  \
        Device Type:             CPU\n*******\nAgent 2\n*******\n  Name:                    gfx906\n  \
        Uuid:                    GPU-1\n  Device Type:             GPU\n*** Done ***\n";

    #[test]
    fn agents_are_found_and_compared() {
        let found = agents(TEXT);
        assert_eq!(found.len(), 2);
        let gpu = gpus(TEXT).remove(0);
        assert_eq!((gpu.value("Name"), gpu.lines.len()), (Some("gfx906"), 3));
        assert!(system(TEXT).iter().any(|line| line.starts_with("Runtime Version")));
        assert!(differences(&gpu, &gpu, &[]).is_empty());
        let mut other = gpu.clone();
        other.lines[1] = "  Uuid:                    GPU-2".to_owned();
        assert_eq!(differences(&gpu, &other, &[]).len(), 1);
        assert!(differences(&gpu, &other, &["Uuid"]).is_empty());
        other.lines.pop();
        assert_eq!(differences(&gpu, &other, &["Uuid"]).len(), 1, "a line that is missing is a difference");
    }
}
